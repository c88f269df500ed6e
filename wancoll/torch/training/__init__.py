"""Training whose members come and go: elastic data parallel, its sampler, DiLoCo."""

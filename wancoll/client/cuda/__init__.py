"""Tensors of CUDA devices: what they say of themselves, and their copies to and from the arena."""

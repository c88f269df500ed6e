"""Metrics in Prometheus' conventions: what there is, what is counted of operations, and the port that tells it."""

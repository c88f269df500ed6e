"""What the metrics are, and what has to be counted for them. Pure."""

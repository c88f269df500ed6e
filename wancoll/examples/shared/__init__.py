"""What the examples share, so that each shows its own idea only: one concept a file."""

"""What the daemon sees of its lanes: stalls, waits, round trips and bandwidths."""

"""The master's pure core: one step function over all groups. No I/O, no clock."""

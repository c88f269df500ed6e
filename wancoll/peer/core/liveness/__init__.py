"""What stands still: a link, an operation, the master; and what a member may do meanwhile. Pure."""

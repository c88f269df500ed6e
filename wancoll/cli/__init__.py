"""wancoll.cli: the one command, `wancoll`."""

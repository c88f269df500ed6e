"""Liveness at the master: who is suspected, what confirms it, what follows, who comes back (R11, R17, R18). Pure."""

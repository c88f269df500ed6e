"""Suspicion, confirmation, eviction, return: of daemons, training processes, links and operations. Pure."""

"""Sockets of the daemon and the master: streams whose sends never wait, listeners, dialling."""

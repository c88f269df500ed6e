"""Sockets of the daemon and the master: streams whose sends never wait, listeners, dialling, bounds on who may connect.

Whatever comes over the network passes here, so encryption has its place. Lanes leave it once they are the engine's.
"""

"""Paths between daemons: announced addresses, probes before an admission, measurements, traffic. Pure."""

"""The peer daemon: trio shells around the pure member and the C engine."""

"""What the kernel tells of a link's connections, and how fast they may send. Pure."""

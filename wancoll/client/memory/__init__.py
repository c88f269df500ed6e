"""Where tensors are: the arena that client and daemon share, tensors as memory, a call's place in it."""

"""Where what fences one master from the next is kept: a journal, or etcd."""

"""wancoll.wire: typed messages and size-capped frames, sans I/O."""

"""wancoll.client: the training process's side, plain blocking Python."""

"""The torch.distributed backend: torch's calls, tensors and handles as those of a communicator."""

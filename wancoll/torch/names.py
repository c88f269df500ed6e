"""What torch calls the backend, and the devices of its tensors. Loads nothing: see entry.py."""

BACKEND = "wancoll"
DEVICES = ("cpu", "cuda")

"""Distributed training over the backend "wancoll", one idea a file: `python -m wancoll.examples.ddp`, and so on."""

"""Commands that try wancoll out on this machine: demo, demo torch, chaos."""

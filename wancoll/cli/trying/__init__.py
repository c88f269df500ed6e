"""Commands that try wancoll out on this machine: demo, chaos."""

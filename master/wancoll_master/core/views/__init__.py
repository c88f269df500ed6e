"""What people see of the master's state: `wancoll status`, the live page, metrics. Pure."""

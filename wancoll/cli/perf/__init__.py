"""`wancoll perf`: collectives are measured on a cluster of this machine, or on a running one."""

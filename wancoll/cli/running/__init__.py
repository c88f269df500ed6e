"""Commands that run: `wancoll master` and `wancoll peer`, and the service around each."""

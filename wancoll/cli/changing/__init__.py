"""Commands that change a running group or its master: leave, evict, token, ca."""

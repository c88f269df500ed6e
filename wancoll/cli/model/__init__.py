"""`wancoll model`: the cost model on paper, of algorithms and of ways to train."""

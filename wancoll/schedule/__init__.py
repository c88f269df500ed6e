"""wancoll.schedule: who sends which bytes to whom, as data."""

"""The law of commit, which members and masters share: a tally of votes, and what reports say of an epoch that ends."""

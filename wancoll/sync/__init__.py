"""What members agree on when they bring their state together: manifests, the election, who sends which stripe."""

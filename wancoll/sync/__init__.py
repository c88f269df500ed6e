"""What members agree on when they bring their state together: manifests, the verdict, who sends which stripe."""

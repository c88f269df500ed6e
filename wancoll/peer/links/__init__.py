"""Links between members: lanes dialled, accepted and handed to the engine."""

"""The daemon's pure cores: members and their operations, as functions of what happened. No I/O, no clock."""

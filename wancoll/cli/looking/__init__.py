"""Commands that look: status, events, doctor, trace. They change nothing."""

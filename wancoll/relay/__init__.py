"""A relay: joins daemons of which neither can dial the other, by splicing connections that both have opened to it."""

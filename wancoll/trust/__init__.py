"""Identities, keys and tokens: they say which process may talk to which.

`cryptography` and the standard `ssl` do all that is cryptographic; only text, rules and files are ours.
"""

"""Who may talk to whom: identities, tokens, certificates and the authority that signs them.

`cryptography` and the standard `ssl` do all that is cryptographic; only text, rules and files are ours.
"""

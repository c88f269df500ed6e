"""The algorithms, one to a file: what each rank sends, receives and reduces, and in which order."""

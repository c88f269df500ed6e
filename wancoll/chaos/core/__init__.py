"""What a chaos run does and what must hold in it: the pure parts of `wancoll chaos`."""

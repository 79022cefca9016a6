"""A run as one value: the parts that every command takes, each made and checked once; its directory and checkpoints."""

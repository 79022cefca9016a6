"""Environments that a policy talks to in turns: the protocol, and their processes."""

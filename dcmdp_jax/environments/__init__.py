"""Environments that a policy talks to in turns: the protocol, their processes, and a calculator."""

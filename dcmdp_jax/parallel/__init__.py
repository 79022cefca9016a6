"""Meshes, sharding, and several hosts."""

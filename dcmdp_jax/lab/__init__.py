"""The laboratory of engine mismatch: the probe and its analysis."""

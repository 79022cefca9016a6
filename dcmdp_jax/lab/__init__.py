"""The laboratory of engine mismatch: the probe and its analysis, grids of runs, the one-state
theory.
"""

"""The one-state analysis of the paper's Appendix B: optimal policies under three mismatch measures.
Float64 numpy.
"""

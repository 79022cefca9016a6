"""The one-state analysis of the paper's Appendix B: optimal policies under three measures."""

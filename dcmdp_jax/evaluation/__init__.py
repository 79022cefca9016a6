"""avg@K and pass@K of a policy on held-out problems."""

"""avg@K and pass@K of a policy on validation prompts."""

"""What a run holds in memory in each phase of a step, by arithmetic."""

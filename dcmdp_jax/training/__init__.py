"""The step, the loop around it, and the checkpoints of a run."""

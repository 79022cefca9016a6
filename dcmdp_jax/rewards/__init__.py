"""Reward functions in processes of their own, and the grading of math answers."""

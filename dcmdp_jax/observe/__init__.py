"""Metrics, alarms, progress and reports of a run."""

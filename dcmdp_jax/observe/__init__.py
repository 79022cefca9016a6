"""Metrics, alerts, progress and reports of a run."""

"""The decoder: parameters declared once, Hugging Face files, attention, log-probs."""

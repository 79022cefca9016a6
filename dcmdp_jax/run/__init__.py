"""A run as four values, made and checked once (task, placement, weights, services); its files."""

"""Studies: a grid of configs and seeds, run one after another and compared."""

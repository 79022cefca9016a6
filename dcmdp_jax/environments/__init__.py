"""Episodes in one turn or several: the sampler, the environments' protocol and processes."""

"""The parts of `benchmarks.accelerator`; each measures one thing in a process of its own."""

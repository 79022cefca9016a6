"""Parts of `benchmarks.compiled`: the text of a compiled program, read."""

"""Commands that `dcmdp NAME` and `bin/` run, flags and one call each."""

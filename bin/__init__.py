"""The commands."""

from dcmdp_jax.process_memory import hide_torch, keep_freed_memory

# Before what they import makes threads.
keep_freed_memory("bin")
hide_torch("bin")

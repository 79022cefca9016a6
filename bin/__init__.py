"""The commands."""

from dcmdp_jax.memory import keep_freed_memory

# Before what they import makes threads.
keep_freed_memory()

"""The commands."""

from dcmdp_jax.memory import prepare_memory

# Before what they import makes threads.
prepare_memory("bin")

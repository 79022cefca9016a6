"""The commands."""

from dcmdp_jax.memory import leave_out_torch, prepare_memory

# Before what they import makes threads.
prepare_memory("bin")
leave_out_torch("bin")

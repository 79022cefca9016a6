"""The commands."""

from dcmdp_jax.activity import command_starts
from dcmdp_jax.process_memory import hide_torch, is_command, keep_freed_memory

# Before what they import makes threads.
keep_freed_memory("bin")
hide_torch("bin")
if is_command("bin"):
    command_starts()

"""What is measured; each module is a command."""

import sys

from dcmdp_jax.memory import prepare_memory

# Before what they import makes threads. Peers run as their users run them.
if not {"benchmarks.peers.trl", "benchmarks.peers.tunix"}.intersection(sys.orig_argv):
    prepare_memory("benchmarks")

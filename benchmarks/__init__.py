"""Measurements of speed and memory; each module is a command."""

import sys

from dcmdp_jax.process_memory import hide_torch, keep_freed_memory

# Before what they import makes threads. Peers run as their users run them, vLLM without this package too.
if not {"benchmarks.peers.trl", "benchmarks.peers.tunix"}.intersection(sys.orig_argv):
    keep_freed_memory("benchmarks")
    if not {"benchmarks.vllm_direct", "torch_step"}.intersection(sys.orig_argv):
        hide_torch("benchmarks")

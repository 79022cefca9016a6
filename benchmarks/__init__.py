"""Measurements of speed and memory; each module is a command."""

import sys

from dcmdp_jax.engines.process_memory import hide_torch, keep_freed_memory, share_heap

# Before what they import makes threads. Peers run as their users run them, vLLM without this
# package too.
_COMMAND = {word for word in sys.orig_argv if word.partition(".")[0] == "benchmarks"}
if _COMMAND and not _COMMAND & {"benchmarks.peers.trl", "benchmarks.peers.tunix"}:
    keep_freed_memory()
    share_heap()
    if not {"benchmarks.vllm_direct", "torch_step"}.intersection(sys.orig_argv):
        hide_torch()

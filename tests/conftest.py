"""Eight fake CPU devices for everything that is sharded; set before anything imports jax.

Nearly all the time of these tests is compilation, so XLA's backend does not optimise here. The whole runs of
training/loop_test.py are processes of their own without these flags.
"""

import os
import sys

# vLLM's CPU build brings CUDA builds of these, and transformers' own models can't be imported beside them; None makes
# them "not installed". No test uses any.
for _name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules.setdefault(_name, None)

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

"""What a later weight sync repeats of vLLM's own reload, and when it must not."""

import os
import subprocess
import sys

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import launch
from tests.support.vllm_tools import vllm_settings
from tests.support.waiting import HANGS_S

_COVERS = """
import inspect
import numpy as np, torch
from dcmdp_jax.engines.sidecar.segments import Tensor
from dcmdp_jax.engines.vllm.worker import _covers

memory = np.zeros(256, np.uint8)
manifest = [
    Tensor(name="a", dtype="float32", shape=(4, 4), offset=0),
    Tensor(name="b", dtype="float32", shape=(8,), offset=64),
]
view = lambda first, end: torch.from_numpy(memory[first:end]).view(torch.float32)
load = lambda tensor: ("weight", inspect.signature(lambda param, loaded: None).bind(None, tensor))
found = [
    _covers([(None, [load(tensor) for tensor in layer]) for layer in plan], memory, manifest)
    for plan in (
        [[view(0, 64), view(64, 96)]],
        [[view(64, 96)], [view(0, 32), view(32, 64)]],
        [[view(0, 64)]],
        [[view(0, 32), view(64, 96)]],
        [[view(0, 64), view(64, 96) + 1]],
    )
]
print("found", *found)
"""


def test_only_views_of_all_the_weights_are_loaded_again(vllm_is_installed):
    """Whole tensors, also by halves; not one left out, half of one, or one that a model computes
    something from.
    """
    done = subprocess.run(
        [sys.executable, "-c", _COVERS],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={
            **os.environ,
            **launch.environment(EngineArguments(settings=vllm_settings(), platform="cpu")),
        },
    )
    assert "found True True False False False\n" in done.stdout, done.stdout + done.stderr[-3000:]

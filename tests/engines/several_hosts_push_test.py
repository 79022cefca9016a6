"""Two processes sync parameters that neither of them holds whole to engines of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

# The engine compares the checksums of what it got with the trainer's by itself.
_PROGRAM = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, logical_axes, param_shapes
from dcmdp_jax.parallel.hosts import join_hosts
from dcmdp_jax.parallel.mesh import make_mesh, sampling_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from tests.support.sampling import local_engine
from dcmdp_jax.engines.sidecar.weights import WeightBridge
from dcmdp_jax.engines.sidecar.segments import Segment
number, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
with join_hosts(f"localhost:{port}", 2, number, 100.0) as hosts:
    config = ModelConfig(
        model_type="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, max_position_embeddings=64, rope_theta=1e4, tie_word_embeddings=True,
    )
    for sizes, engine_axes in (((1, 4, 1, 1), {}), ((4, 1, 1, 1), {}), ((1, 2, 2, 1), {"tensor": 2})):
        mesh = make_mesh(*sizes)
        shapes = param_shapes(config, "float32")
        shardings = param_shardings(logical_axes(config), shapes, mesh)
        create = jax.jit(lambda: init_params(config, jax.random.key(0), "float32"), out_shardings=shardings)
        params = create()
        own = sampling_mesh(mesh, **engine_axes)
        engine = local_engine(config, precision="float32", max_total_tokens=32, mesh=own)
        engine.sync_weights(params, 0)
        prints = hosts.gather(int(engine.weights_fingerprint))
        assert len(set(prints)) == 1, prints
    bridge = WeightBridge(config, dtype="bfloat16")
    segment = Segment(f"t-{number}", bridge.num_bytes)
    sums = bridge.publish(params, segment, 3)
    all_sums = hosts.gather(np.asarray(sums))
    assert (all_sums[0] == all_sums[1]).all()
    segment.close()
    print("all is well", flush=True)
"""


@pytest.mark.long
def test_engines_of_two_processes_get_the_same_weights_from_any_mesh():
    port = str(free_port())
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(number), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in started:
        stdout, stderr = process.communicate(timeout=HANGS_S)
        assert process.returncode == 0 and "all is well" in stdout, stderr

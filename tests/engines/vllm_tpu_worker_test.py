"""The worker extension for TPUs with a runner of our own making: a model in NNX, and the rules of tpu-inference 0.32.

No TPU and no tpu-inference: what is shown is that the extension keeps its order and its rules.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcmdp_jax.engines.sidecar.manifest import Tensor, checksum
from dcmdp_jax.engines.sidecar.shared_memory import Segment

pytest.importorskip("torch")
from dcmdp_jax.engines.vllm import received  # noqa: E402
from dcmdp_jax.engines.vllm.tpu_worker import TpuWeightReceiver  # noqa: E402

_LISTED = [["up.weight", "float32", [4, 3], 0], ["down.weight", "bfloat16", [2, 4], 64]]
_SIZE = 128


class _Model(nnx.Module):
    """Kernels as tpu-inference keeps them: the transposes of the checkpoint's."""

    def __init__(self):
        self.up = nnx.Param(jnp.zeros((3, 4)))
        self.down = nnx.Param(jnp.zeros((4, 2), jnp.bfloat16))
        self.skipped = ()

    def __call__(self, x):
        return x @ self.up[...] @ self.down[...].astype(jnp.float32)

    def load_weights(self, weights):
        params = {"up.weight": self.up, "down.weight": self.down}
        for name, tensor in weights:
            if name not in self.skipped:
                value = jnp.asarray(tensor.float().numpy().T.copy()).astype(params[name][...].dtype)
                params[name].set_value(value)


class _Runner:
    """The attributes that dispatch reads, made as `TPUModelRunner.load_model` and `get_flax_model` make them."""

    def __init__(self, calls):
        self.mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
        self.model, self.calls = _Model(), calls
        self.graph, self.state = nnx.split(self.model)
        self._treedef = jax.tree.structure(self.state)
        self.state_leaves = tuple(jax.tree.leaves(self.state))
        self.compute_logits_fn = lambda leaves, x: self.dispatch(x)
        self.rng_params_for_sampling = jax.device_put(
            nnx.Rngs(jax.random.key(0)).params(), NamedSharding(self.mesh, PartitionSpec())
        )

    def refresh_state_leaves(self):
        self.calls.append("refresh")
        self.state_leaves = tuple(jax.tree.leaves(self.state))

    def dispatch(self, x):
        state = jax.tree.unflatten(self._treedef, self.state_leaves)
        return nnx.merge(self.graph, state)(x)


class _Worker(TpuWeightReceiver):
    def __init__(self):
        self.calls = []
        self.model_runner = _Runner(self.calls)

    def start_weight_update(self):
        self.calls.append("start")

    def finish_weight_update(self):
        self.calls.append("finish")


@pytest.fixture
def segment():
    """Weights drawn from a seed, as the bridge writes them: segment(seed) -> path, product of the kernels."""
    memory = Segment("dcmdp-weights-test", _SIZE)

    def write(seed):
        rng = np.random.default_rng(seed)
        up = rng.integers(-3, 4, (4, 3)).astype(np.float32)
        down = rng.integers(-3, 4, (2, 4)).astype(np.float32)
        memory.bytes[:48] = up.reshape(-1).view(np.uint8)
        memory.bytes[64:80] = down.astype(jnp.bfloat16).reshape(-1).view(np.uint8)
        return f"/proc/self/fd/{memory.descriptor}", up.T @ down.T

    yield write
    received.attached.cache_clear()
    memory.close()


def test_dispatch_uses_the_new_weights_after_each_push(segment):
    worker = _Worker()
    x = np.eye(3, dtype=np.float32)
    for version in (1, 2):
        path, expected = segment(version)
        sums = worker.dcmdp_receive(path, _SIZE, _LISTED, version)
        np.testing.assert_array_equal(worker.model_runner.dispatch(x), expected)
        memory = received.attached(path, _SIZE)
        for total, (name, dtype, shape, offset) in zip(sums, _LISTED, strict=True):
            size = Tensor(name, dtype, tuple(shape), offset).num_bytes
            assert total == checksum(memory[offset : offset + size], version)
    assert worker.calls == ["start", "refresh", "finish"] * 2


def test_leaves_that_are_not_taken_again_are_stale(segment, monkeypatch):
    """The trap that the refresh is for: the load succeeds, and programs run with the old weights."""
    worker = _Worker()
    monkeypatch.setattr(worker.model_runner, "refresh_state_leaves", lambda: None)
    path, expected = segment(1)
    worker.dcmdp_receive(path, _SIZE, _LISTED, 1)
    assert not np.asarray(worker.model_runner.dispatch(np.eye(3, dtype=np.float32))).any() and expected.any()


def test_a_loader_that_changes_a_leaf_is_refused(segment):
    """Its programs are compiled for the old shapes, dtypes and shardings."""
    worker = _Worker()
    path, _ = segment(1)
    plain = worker.model_runner.model.load_weights

    def wider(weights):
        plain(weights)
        worker.model_runner.model.down.set_value(worker.model_runner.model.down[...].astype(jnp.float32))

    object.__setattr__(worker.model_runner.model, "load_weights", wider)
    with pytest.raises(RuntimeError, match="differ from the old ones in shape, dtype or sharding"):
        worker.dcmdp_receive(path, _SIZE, _LISTED, 1)


def test_a_model_in_torch_is_refused(segment):
    worker = _Worker()
    worker.model_runner.state = {"weights": "of torchax"}
    with pytest.raises(RuntimeError, match="MODEL_IMPL_TYPE"):
        worker.dcmdp_receive(segment(1)[0], _SIZE, _LISTED, 1)
    assert worker.calls == []


def test_logits_are_divided_and_no_longer(segment):
    worker = _Worker()
    worker.dcmdp_receive(segment(1)[0], _SIZE, _LISTED, 1)
    x = np.eye(3, dtype=np.float32)
    plain = np.asarray(worker.model_runner.compute_logits_fn((), x))
    for _ in range(2):
        worker.dcmdp_scale_logits(2.0)
        np.testing.assert_array_equal(worker.model_runner.compute_logits_fn((), x), plain / 2)
    worker.dcmdp_scale_logits(1.0)
    np.testing.assert_array_equal(worker.model_runner.compute_logits_fn((), x), plain)


def test_a_call_starts_its_random_numbers_again():
    """A function of the call's seed; of an interrupted call too."""
    worker = _Worker()
    keys = []
    for seed in (5, 6, 5):
        worker.dcmdp_seed(seed)
        keys.append(jax.random.key_data(worker.model_runner.rng_params_for_sampling).tolist())
    assert keys[0] == keys[2] != keys[1]

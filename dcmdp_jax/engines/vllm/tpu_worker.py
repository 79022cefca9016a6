"""Extension of tpu-inference's worker: loads weights from shared memory into a model in JAX.

Written against tpu-inference 0.32.0; never tested on a TPU. Imported by vLLM on a TPU only, under its own interpreter.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dcmdp_jax.engines.sidecar import manifest
from dcmdp_jax.engines.vllm.received import attached, handed_over


class TpuWeightReceiver:
    """Methods of a `TPUWorker`; `self` is the worker. One process drives all chips of an engine."""

    model_runner: Any

    def dcmdp_receive(self, path: str, size: int, listed: list[Any], policy_version: int) -> list[int]:
        """Load every tensor of a weight segment; return the checksums of what was handed to the model.

        The cache is freed meanwhile: old and new weights lie in the chips' memory together. The caller resets the
        prefix cache before it schedules anything.

        Args:
            path: /proc path of the segment; `size` bytes.
            listed: the manifest.
            policy_version: of the checksums.

        Raises:
            RuntimeError: if the model is not one in JAX, or does not take every tensor in its place.
        """
        runner = self.model_runner
        if not isinstance(runner.state, nnx.State):
            raise RuntimeError("the model is torch code inside vLLM, which takes no pushed weights: MODEL_IMPL_TYPE")
        tensors = manifest.parse(listed, size)
        sums: dict[str, int] = {}
        before = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in runner.state_leaves]
        self.start_weight_update()  # type: ignore[attr-defined]
        with jax.set_mesh(runner.mesh):
            runner.model.load_weights(handed_over(attached(path, size), tensors, policy_version, sums))
        # The state was split from the model when that was built: it holds the old arrays until it is split again, and
        # programs are called with its leaves until those are taken again. Either left out, nothing changes.
        _, runner.state = nnx.split(runner.model)
        runner.refresh_state_leaves()
        jax.block_until_ready(runner.state_leaves)  # the segment may be written again after the answer
        self.finish_weight_update()  # type: ignore[attr-defined]
        if missing := [tensor.name for tensor in tensors if tensor.name not in sums]:
            raise RuntimeError(f"the engine did not take {missing[0]} and {len(missing) - 1} more tensors")
        if len(runner.state_leaves) != len(before) or not all(map(_fits, runner.state_leaves, before)):
            raise RuntimeError("the new weights differ from the old ones in shape, dtype or sharding")
        return [sums[tensor.name] for tensor in tensors]

    def dcmdp_scale_logits(self, temperature: float) -> None:
        """Divide all logits by `temperature` from now on; 1 ends it. As `worker.WeightReceiver`."""
        runner = self.model_runner
        plain = getattr(runner.compute_logits_fn, "unscaled", runner.compute_logits_fn)
        runner.compute_logits_fn = plain
        if temperature != 1.0:

            def scaled(*arguments: Any, **options: Any) -> jax.Array:
                return plain(*arguments, **options).astype(jnp.float32) / temperature

            scaled.unscaled = plain  # type: ignore[attr-defined]
            runner.compute_logits_fn = scaled

    def dcmdp_seed(self, seed: int) -> None:
        """Start the runner's stream of random numbers again: on a TPU a request has no seed of its own.

        What is sampled then depends on `seed` and on the requests that are scheduled together.
        """
        runner = self.model_runner
        old = runner.rng_params_for_sampling
        runner.rng_params_for_sampling = jax.device_put(nnx.Rngs(jax.random.key(seed)).params(), old.sharding)


def _fits(leaf: jax.Array, before: tuple[Any, ...]) -> bool:
    shape, dtype, sharding = before
    return (leaf.shape, leaf.dtype) == (shape, dtype) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)

"""The embedded engine with an injected mismatch: noise on its weights, or weights it keeps.

    --config.rollout.engine=examples/countdown/sampler.py:SAMPLER
    '--config.rollout.engine_args={"noise": 0.02}'

Both as in the sweeps of score centering (research/countdown.md): a relative Gaussian perturbation
that is the same at every weight sync, and weights of which every k-th weight sync is taken, so that what
samples is 0 to k - 1 steps old. It reports them as the newest, as is done there: the discrepancy
has the staleness in it, where `rollout.lag` takes it out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local import LocalKind, LocalSettings
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.fields import setting


@dataclasses.dataclass(frozen=True)
class Settings(LocalSettings):
    noise: float = setting(0.0, "Standard deviation of the weights' relative noise.", minimum=0)
    noise_seed: int = setting(0, "Seed of the noise.", minimum=0)
    every: int = setting(1, "Weight syncs of which one is taken.", unit="weight syncs", minimum=1)


@jax.jit
def noisy(params: Any, seed: jax.Array, scale: jax.Array) -> Any:
    """w (1 + scale z) of every parameter, z standard normal by seed and place."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = (
        1 + scale * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    return jax.tree.unflatten(
        structure,
        [(leaf * one).astype(leaf.dtype) for leaf, one in zip(leaves, noise, strict=True)],
    )


class Sampler(LocalEngine):
    """`LocalEngine`, which gets other weights than are synced."""

    def __init__(self, arguments: EngineArguments) -> None:
        super().__init__(arguments)
        self._settings = arguments.settings
        self._kept = None

    def sync_weights(self, params: Any, policy_version: int) -> dict[str, float]:
        """Versions 0, k, 2 k, ... and the first after a restart are taken, and get the noise."""
        one = self._settings
        if self._kept is None or policy_version % one.every == 0:
            # The trainer may overwrite its own.
            self._kept = (
                noisy(params, one.noise_seed, one.noise)
                if one.noise
                else jax.tree.map(jnp.copy, params)
            )
        found = super().sync_weights(self._kept, policy_version)
        if one.every == 1:
            self._kept = None
        return found

    def close(self) -> None:
        self._kept = None
        super().close()


class SamplerKind(LocalKind):
    """The embedded engine's kind, with the settings above."""

    name = "sampler"
    settings = Settings

    def build(self, arguments: EngineArguments) -> Sampler:
        return Sampler(arguments)

    def memory(self, arguments: EngineArguments, load: Any, machine: Any, rows: int) -> list[Any]:
        return super().memory(_embedded(arguments), load, machine, rows)

    def programs(self, arguments: EngineArguments, load: Any) -> Any:
        return super().programs(_embedded(arguments), load)


def _embedded(arguments: EngineArguments) -> EngineArguments:
    """The embedded engine's arguments, whose settings are a mesh alone."""
    own = arguments.settings
    return dataclasses.replace(arguments, settings=LocalSettings(own.tensor, own.expert))


SAMPLER = SamplerKind()

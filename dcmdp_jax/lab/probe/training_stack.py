"""The training stack as something that scores: log-probs and entropies as the training step computes them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.data.episode import TOP_IDS
from dcmdp_jax.data.packing import one_a_row
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.types import Params, Rows

LOGPROB_CHUNK = 256
"""Tokens whose logits exist at one time: 50 MB of a vocabulary of 50,000."""
_MOST_ROWS, _ROWS = 32, 8
_SHORTEST = 16


class TrainingStack:
    """Scores completions with the forward pass of the training step, on one device."""

    def __init__(self, config: ModelConfig, params: Params, *, compute: Compute, scheme: Scheme = FULL) -> None:
        """Keep the parameters; nothing is compiled yet.

        Args:
            config: the model.
            params: the trainer's parameters.
            compute: dtype and kernel of the forward pass.
            scheme: roundings of an engine that it repeats.
        """
        self._config, self._params, self._compute, self._scheme = config, params, compute, scheme

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> Sequence[np.ndarray]:
        """Log-probs, float32 nats, one array for each completion."""
        return self.score_with_entropies(prompts, completions, temperature=temperature)[0]

    def score_with_entropies(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """Log-probs and entropies, float32 nats, one array each for each completion."""
        program = _program(self._config, self._compute, self._scheme, temperature)
        return tuple(zip(*in_rows(functools.partial(program, self._params), prompts, completions), strict=True))

    def score_listed(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], listed: Sequence[np.ndarray], *,
        temperature: float,
    ) -> list[np.ndarray]:  # fmt: skip
        """Log-probs of listed ids [T_i, k] in the place of each token, float32 nats, likewise."""
        program = _program(self._config, self._compute, self._scheme, temperature, listed=True)
        return [one[0] for one in in_rows(functools.partial(program, self._params), prompts, completions, listed)]

    def close(self) -> None:
        """Nothing to free: the parameters are the caller's."""


@functools.lru_cache(maxsize=16)
def _program(
    config: ModelConfig, compute: Compute, scheme: Scheme, temperature: float, *, listed: bool = False
) -> Callable[[Params, Rows], jax.Array]:
    row_logprobs = make_row_logprobs(config, compute, temperature=temperature, mesh=one_device_mesh(), scheme=scheme)

    def scored(params: Params, rows: Rows) -> jax.Array:
        found = row_logprobs(params, rows)
        return found.top_logprobs[None] if listed else jnp.stack(found[:2])

    return jax.jit(scored)


def in_rows(
    run: Callable[[Rows], jax.Array], prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray],
    listed: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Run a program on completions, one a row, and cut its results [K, R, L, ...] to their tokens: [K, T_i, ...] each.

    Rows are at most 32 a call, of one length for each power of two, so few shapes compile. With `listed`, ids [T_i, k],
    they have the column `top_ids`.
    """
    totals = [len(p) + len(c) for p, c in zip(prompts, completions, strict=True)]
    buckets = [max(_SHORTEST, 1 << (total - 1).bit_length()) for total in totals]
    found: list[Any] = [None] * len(totals)
    for bucket in sorted(set(buckets)):
        members = [index for index, other in enumerate(buckets) if other == bucket]
        length = -(-max(totals[index] for index in members) // _SHORTEST) * _SHORTEST
        count = len(members) if len(members) < _ROWS else min(_MOST_ROWS, -(-len(members) // _ROWS) * _ROWS)
        for start in range(0, len(members), count):
            part = members[start : start + count]
            rows = one_a_row([prompts[i] for i in part], [completions[i] for i in part], length, count)
            if listed is not None:
                rows = rows.with_columns(**{TOP_IDS: in_places(rows, np.concatenate([listed[i] for i in part]))})
            results = np.asarray(run(rows))
            for place, index in enumerate(part):
                found[index] = results[:, place, len(prompts[index]) : totals[index]].copy()
    return found


def in_places(rows: Rows, values: np.ndarray) -> np.ndarray:
    """A column [R, L, ...] of rows, from values [n, ...] of all sampled tokens in order; 0 elsewhere."""
    column = np.zeros((*rows.input_ids.shape, *values.shape[1:]), values.dtype)
    column[rows.completion_mask] = values
    return column

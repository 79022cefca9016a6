"""A stand-in for cuDNN's packed attention, which reads memory as cuDNN does.

It takes flat memory, offsets in elements and lengths, and nothing else.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn


class StandIn:
    """A primitive's `bind`. What cuDNN does not write is NaN."""

    def __init__(self, *, backward: bool) -> None:
        self._backward = backward
        self.calls = 0

    def bind(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *rest: Any, **options: Any
    ) -> list[jax.Array]:
        bias, lengths, key_lengths, offsets, key_offsets, _, _, *saved = rest
        assert bias.size == 0 and lengths is key_lengths
        assert options["mask_type"] == cudnn.MaskType.PADDING_CAUSAL
        assert (
            lengths.shape == (query.shape[0], offsets.shape[1] - 1)
            and lengths.dtype == offsets.dtype == jnp.int32
        )
        self.calls += 1
        # cuDNN's log-sum-exp, of which there is one for each segment that a row may have.
        statistics = jax.ShapeDtypeStruct(
            (lengths.size, query.shape[2], query.shape[1]), jnp.float32
        )
        if self._backward:
            assert saved[0].shape == statistics.shape
            shapes = (query, key, value)
            arguments = (saved[1], saved[2])
        else:
            assert options["is_training"]
            shapes = (query, statistics)
            arguments = ()
        run = functools.partial(
            _run, self._backward, options["scale"], options["sliding_window_length"]
        )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes]
        return jax.pure_callback(
            run, shapes, query, key, value, lengths, offsets, key_offsets, *arguments
        )


def _run(backward, scale, window, *arrays):
    query, key, value, lengths, offsets, key_offsets, *rest = (np.asarray(x) for x in arrays)
    heads = query.shape[2]
    kv_heads = key.shape[2]
    width = query.shape[3]
    results = [np.full(x.size, np.nan) for x in ((query, key, value) if backward else (query,))]

    def read(x, offset, tokens):
        return x.reshape(-1)[offset : offset + tokens * x.shape[2] * width].reshape(
            tokens, x.shape[2], width
        )

    def write(result, offset, part):
        result[offset : offset + part.size] = part.reshape(-1)

    for tokens, offset, key_offset in zip(
        lengths.flat, offsets.flat, key_offsets.flat, strict=False
    ):
        if not tokens:
            continue
        q = read(query, offset, tokens)
        k = read(key, key_offset, tokens)
        v = read(value, key_offset, tokens)
        k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
        # cuDNN's window holds the query itself.
        seen = np.tri(tokens, dtype=bool) & ~np.tri(tokens, k=-(window or tokens), dtype=bool)
        scores = scale * np.einsum("qhd,khd->hqk", q, k) + np.where(seen, 0, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e30))
        weights /= weights.sum(axis=-1, keepdims=True)
        if not backward:
            write(results[0], offset, np.einsum("hqk,khd->qhd", weights, v))
            continue
        bar = read(rest[1], offset, tokens)
        pulled = np.einsum("qhd,khd->hqk", bar, v)
        scores_bar = scale * weights * (pulled - np.sum(weights * pulled, axis=-1, keepdims=True))
        gradients = (
            np.einsum("hqk,khd->qhd", scores_bar, k),
            np.einsum("hqk,qhd->khd", scores_bar, q),
            np.einsum("hqk,qhd->khd", weights, bar),
        )
        shared = [x.reshape(tokens, kv_heads, -1, width).sum(axis=2) for x in gradients[1:]]
        for result, at, part in zip(
            results, (offset, key_offset, key_offset), (gradients[0], *shared), strict=True
        ):
            write(result, at, part)
    shaped = [
        r.reshape(x.shape).astype(x.dtype)
        for r, x in zip(results, (query, key, value), strict=False)
    ]
    statistics = [] if backward else [np.zeros((lengths.size, heads, query.shape[1]), np.float32)]
    return [*shaped, *statistics]


def stand_in_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Forward and backward, in the place of JAX's primitives."""
    made = [StandIn(backward=False), StandIn(backward=True)]
    for name, one in zip(("fwd", "bwd"), made, strict=True):
        monkeypatch.setattr(cudnn, f"_dot_product_attention_{name}_p", one)
    return made

"""The attention kernels that `model.attention` offers here: their error and their time beside the
plain version's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator_parts import limits
from benchmarks.accelerator_parts.sizes import Size, Tell, run_settings
from benchmarks.timing import interleave
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.models.attention import RowKernel, row_attention
from dcmdp_jax.models.ops import REFERENCE, choose_ops
from dcmdp_jax.plan.published import model_of

PLAIN = "plain"
PASSES = {"forward": 2, "forward and backward": 6}
"""Products of each pass: q k and p v; the gradients of both factors of each."""
RESULTS = ("output", "query gradient", "key gradient", "value gradient")
MOST_ERROR = 3.0
"""The largest error of a kernel, in units of the plain version's in the same dtype;
FlashAttention's own tests allow 2 for outputs and 3 for gradients.
"""

Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(query [R, L, H, h], key [R, L, K, h], value) -> [R, L, H, h]."""


class Inputs(NamedTuple):
    """Heads and the cotangent of the output, which is 0 on padding."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    cotangent: jax.Array


def segments(rows: int, length: int, *, packed: bool) -> np.ndarray:
    """[R, L] int32: one sequence and padding, or seven and padding, of 1 to 7 parts of the row
    each.
    """
    real = length - length // 16
    ids = np.zeros((rows, length), np.int32)
    ids[:, :real] = 1
    if packed:
        ends = np.cumsum(np.arange(1, 8)) * real // 28
        ids[:, :real] = 1 + np.searchsorted(ends, np.arange(real), side="right")
    return ids


def random_inputs(heads: int, kv_heads: int, width: int, segment_ids: np.ndarray) -> Inputs:
    """Normal heads in bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = heads, kv_heads, kv_heads, heads
    arrays = [
        jax.random.normal(key, (*segment_ids.shape, count, width), jnp.bfloat16)
        for key, count in zip(keys, counts, strict=True)
    ]
    return Inputs(*arrays[:3], arrays[3] * (segment_ids > 0)[..., None, None])


def contenders(platform: str, segment_ids: jax.Array, *, packed: bool) -> dict[str, Attention]:
    """The plain version, and every kernel of this platform that is another one."""
    ops = choose_ops(platform)
    plain = RowKernel(name="xla", ops=REFERENCE, one_segment=not packed)
    kernels = {PLAIN: plain}
    if ops.attention is not REFERENCE.attention:
        kernels["xla"] = dataclasses.replace(plain, ops=ops)
    name = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(platform)
    if name:
        kernels[name] = dataclasses.replace(plain, name=name, ops=ops)
    if name == "cudnn" and packed:
        most = int(np.max(segment_ids))
        kernels["cudnn, packed layout"] = dataclasses.replace(kernels[name], segments=most)
    return {
        name: functools.partial(row_attention, segment_ids=segment_ids, kernel=kernel)
        for name, kernel in kernels.items()
    }


def with_gradients(attend: Attention, inputs: Inputs) -> tuple[jax.Array, ...]:
    """`RESULTS`."""
    output, pull = jax.vjp(attend, *inputs[:3])
    return output, *pull(inputs.cotangent)


def exact_results(attend: Attention, inputs: Inputs) -> list[np.ndarray]:
    """`RESULTS` of the plain version in float32 with products in full precision."""
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(with_gradients, attend))
        return [np.asarray(x) for x in exact(Inputs(*(x.astype(jnp.float32) for x in inputs)))]


def largest_errors(
    results: tuple[jax.Array, ...], exact: list[np.ndarray], real: np.ndarray
) -> dict[str, float]:
    """max |x - exact| over max |exact| of each result, on real tokens [R, L]; NaN if there is
    any.
    """
    errors = {}
    for name, ours, theirs in zip(RESULTS, results, exact, strict=True):
        difference = np.abs(np.asarray(ours.astype(jnp.float32)) - theirs)[real]
        errors[name] = float(difference.max() / np.abs(theirs[real]).max())
    return errors


def too_large(errors: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line for each error that is no number or above `MOST_ERROR` times the plain version's."""
    return [
        f"{kernel}: {name} is off by {error:.3g} of its largest value, the plain version by "
        f"{errors[PLAIN][name]:.3g}"
        for kernel, of_kernel in errors.items()
        for name, error in of_kernel.items()
        if not error <= MOST_ERROR * errors[PLAIN][name]
    ]


def product_flops(segment_ids: np.ndarray, heads: int, width: int) -> float:
    """Operations of one of the two products of a forward pass: a token sees those of its segment up
    to itself.
    """
    counts = [np.bincount(row)[1:].astype(float) for row in segment_ids]
    pairs = sum(float((count * (count + 1) / 2).sum()) for count in counts)
    return 2.0 * pairs * heads * width


def measure(size: Size, tell: Tell, *, packed: bool) -> None:
    """Errors and times, with several sequences in a row or with one.

    Raises:
        ArithmeticError: after all is measured, if an error is larger than `MOST_ERROR` allows.
    """
    model = model_of(from_config_dict(run_settings(size)))
    chip, source = limits.chip_here(size)
    ids = segments(size.micro_batch_tokens // size.row_length, size.row_length, packed=packed)
    inputs = random_inputs(model.num_heads, model.num_kv_heads, model.head_dim, ids)
    attends = contenders(jax.default_backend(), jnp.asarray(ids), packed=packed)
    found: dict[str, Any] = {
        "kind": "attention",
        "rows": ids.shape[0],
        "length": ids.shape[1],
        "sequences_per_row": int(ids.max()),
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "chip_figures": source,
        "errors": {},
        "passes": {},
    }
    exact = exact_results(attends[PLAIN], inputs)
    for name, attend in attends.items():
        results = jax.jit(functools.partial(with_gradients, attend))(inputs)
        found["errors"][name] = largest_errors(results, exact, ids > 0)
        tell(found)
    for pass_name, products in PASSES.items():
        calls = {}
        compiled = {}
        for name, attend in attends.items():
            function = (
                attend if pass_name == "forward" else functools.partial(with_gradients, attend)
            )
            arguments = inputs[:3] if pass_name == "forward" else (inputs,)
            executable, compiled[name] = limits.compile_and_read(
                name, jax.jit(function), *arguments
            )
            calls[name] = functools.partial(executable, *arguments)
        times = interleave(calls, size.repeats)
        needed = products * product_flops(ids, model.num_heads, model.head_dim)
        found["passes"][pass_name] = {
            name: {"seconds": seconds, "temporary_bytes": compiled[name].temporary}
            | limits.limits(compiled[name], chip, float(np.median(seconds)), needed)
            for name, seconds in times.items()
        }
        tell(found)
    if wrong := too_large(found["errors"]):
        raise ArithmeticError("; ".join(wrong))

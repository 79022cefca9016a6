"""Checks of compiled programs: arrays that a large model must not hold or gather, and the goals for
their cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from benchmarks.compiled_parts.collectives import Collective
from benchmarks.compiled_parts.hlo import Array
from benchmarks.compiled_parts.least import least_of
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import num_params, param_shapes
from dcmdp_jax.plan.run_plan import CompiledRun

MOST_FLOPS_RATIO = 1.45
"""Goal for compiled over needed operations, with full rematerialization."""
MOST_TRAFFIC_RATIO = 1.2
"""Goal for received bytes over the least."""
MOST_SECONDS = 180
"""Goal for the compilation of a program."""

Dims = tuple[int, ...]


class Check(NamedTuple):
    """A property of the compiled programs.

    Attributes:
        name: what is checked.
        found: what was found.
        holds: whether it holds.
    """

    name: str
    found: str
    holds: bool


class ModelShapes(NamedTuple):
    """Shapes of parameters on a mesh, by which arrays of a program are told apart.

    Attributes:
        stacked: dimensions of every parameter of the layers with all layers, sorted, without 1s,
            whole or split.
        single: those of one layer, and of the parameters outside the layers.
        sizes: of every axis of those, and of a head.
        widths: sizes that stand beside the vocabulary in a parameter.
        vocab: the vocabulary, and the part of it on each device.
        query_group: query heads of a key-value head.
        parameters: elements of the whole tree.
    """

    stacked: frozenset[Dims]
    single: frozenset[Dims]
    sizes: frozenset[int]
    widths: frozenset[int]
    vocab: frozenset[int]
    query_group: int
    parameters: int


def check_goals(plan: CompiledRun) -> list[Check]:
    """Check the compiled programs of a run. One that does not fit has nothing to check."""
    shapes = model_shapes(plan.run.model, plan.run.placement.mesh)
    wrong: dict[str, list[str]] = {
        "no [tokens, vocabulary] array": [],
        "no [length, length] attention matrix": [],
        "no gather of a parameter of all layers": [],
    }
    programs = (plan.step, *(plan.engine.programs if plan.engine else ()))
    for name, program in ((one.name, one) for one in programs if is_compiled(plan, one.name)):
        read = plan.programs[name].account
        found = (
            all_logits(read.arrays, program.tokens, shapes),
            [
                array
                for length in program.row_lengths
                for array in attention_matrices(read.arrays, length, shapes)
            ],
            tree_gathers(read.collectives, shapes),
        )
        for arrays, texts in zip(found, wrong.values(), strict=True):
            texts += [
                f"{array} in {name}"
                for array in sorted(arrays, key=lambda array: (-array.size, str(array)))[:1]
            ]
    checks = [Check(name, ", ".join(texts) or "none", not texts) for name, texts in wrong.items()]
    if is_compiled(plan, "step"):
        least = least_of(plan)
        for name, ratio, most in (
            ("compiled / needed operations", least.flops_ratio(plan), MOST_FLOPS_RATIO),
            ("received / least bytes", least.traffic_ratio(plan), MOST_TRAFFIC_RATIO),
        ):
            checks.append(Check(f"{name} at most {most}", f"{ratio:.2f}", ratio <= most))
    seconds = {name: one.seconds for name, one in plan.programs.items()}
    text = ", ".join(f"{name} {value:.0f}" for name, value in seconds.items())
    checks.append(
        Check(f"compilation at most {MOST_SECONDS} s", text, max(seconds.values()) <= MOST_SECONDS)
    )
    return checks


def is_compiled(plan: CompiledRun, name: str) -> bool:
    """Whether a program was compiled, and was not too large."""
    return name in plan.programs and plan.programs[name].refused is None


def model_shapes(model: ModelConfig, mesh: Mesh) -> ModelShapes:
    """The shapes of a model's parameters, whole and in any split that the mesh allows."""
    ways = set(mesh.shape.values()) | {1}
    stacked = set()
    single = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(model)):
        dims = leaf.shape
        if path[0].key == "layers":
            stacked |= {_sorted((dims[0], *part)) for part in _splits(dims[1:], ways)}
            dims = dims[1:]
        single |= {_sorted(part) for part in _splits(dims, ways)}
    return ModelShapes(
        stacked=frozenset(stacked),
        single=frozenset(single),
        sizes=frozenset((model.head_dim, *itertools.chain(*single))),
        widths=frozenset(_divided(model.hidden_size, ways)),
        vocab=frozenset(_divided(model.vocab_size, {1, mesh.shape["tensor"]})),
        query_group=model.num_heads // model.num_kv_heads,
        parameters=num_params(model),
    )


def attention_matrices(arrays: Iterable[Array], length: int, shapes: ModelShapes) -> list[Array]:
    """Arrays with two axes along a row of `length` tokens: scores of attention, masks.

    An axis of queries may hold those of a group of heads, as in `ops.cpu.attention`. A length that
    is the size of a parameter's axis too says nothing: activations have both.
    """
    along = {length, length * shapes.query_group} - shapes.sizes
    return [array for array in arrays if sum(dim in along for dim in array.dims) >= 2]


def all_logits(arrays: Iterable[Array], tokens: int, shapes: ModelShapes) -> list[Array]:
    """Arrays of the vocabulary for `tokens` tokens or more: [T, V], however many axes T has."""
    return [
        array
        for array in arrays
        for vocab in shapes.vocab & set(array.dims)
        if array.size // vocab >= tokens and array.size // vocab not in shapes.widths
    ]


def tree_gathers(collectives: Iterable[Collective], shapes: ModelShapes) -> list[Array]:
    """Gathered arrays that hold a parameter of all layers, or half of the whole tree."""
    return [
        one.array
        for one in collectives
        if one.kind == "all-gather"
        and (
            _sorted(one.array.dims) in shapes.stacked - shapes.single
            or 2 * one.array.size >= shapes.parameters
        )
    ]


def _sorted(dims: Iterable[int]) -> Dims:
    return tuple(sorted(dim for dim in dims if dim != 1))


def _splits(dims: Dims, ways: set[int]) -> Iterator[Dims]:
    return itertools.product(*(_divided(dim, ways) for dim in dims))


def _divided(size: int, ways: set[int]) -> list[int]:
    return [size // count for count in ways if size % count == 0]

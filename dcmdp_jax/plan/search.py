"""Search over mesh shapes and micro-batch sizes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from dcmdp_jax.config.settings import Config, MeshSettings
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.plan.run_plan import GIB, CompiledRun, compile_run
from dcmdp_jax.plan.topologies import Topology

_WAYS = (1, 2, 4, 8)
# Rows of the splash kernel have a multiple of this length.
_ROW_MULTIPLE = 512
_ROWS = (1, 2, 4)


class Tried(NamedTuple):
    """A candidate and its plan.

    Attributes:
        mesh: the settings.
        micro_batch_tokens: on each device.
        plan: with the step compiled; None if the mesh does not fit the model.
        refused: why, if so.
    """

    mesh: MeshSettings
    micro_batch_tokens: int
    plan: CompiledRun | None
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether the step fits."""
        return self.plan is not None and self.plan.fits

    @property
    def peak(self) -> int | None:
        """Bytes of the largest phase; None without a plan."""
        return None if self.plan is None else max(phase.total for phase in self.plan.phases)


def table(tried: Sequence[Tried]) -> str:
    """A line for each candidate."""
    lines = ["rank  data fsdp tensor expert  micro_batch_tokens  peak GiB"]
    for rank, one in enumerate(tried, 1):
        mesh = one.mesh
        shape = f"{mesh.data:4} {mesh.fsdp:4} {mesh.tensor:6} {mesh.expert:6}  {one.micro_batch_tokens:18}"
        said = one.refused or f"{one.peak / GIB:8.2f}{'' if one.fits else '  does not fit'}"
        lines.append(f"{rank if one.fits else '-':>4}  {shape}  {said}")
    return "\n".join(lines if any(one.fits for one in tried) else [*lines, "nothing of these fits"])


def search_record(tried: Sequence[Tried]) -> dict[str, Any]:
    """The table as a tree for JSON."""
    return {
        "candidates": [
            {"mesh": dataclasses.asdict(one.mesh), "micro_batch_tokens": one.micro_batch_tokens,
             "refused": one.refused, "fits": one.fits, "peak_bytes": one.peak}
            for one in tried
        ]
    }  # fmt: skip


def search(config: Config, topology: Topology, *, tell: Callable[[str], None]) -> list[Tried]:
    """Compile the step for every candidate; minutes for each of a large model.

    Meshes: tensor 1, 2, 4, 8 and, with experts, expert 1, 2, 4, 8, the rest of the devices fsdp. Micro-batches of 1, 2
    and 4 rows on each device; no more once one does not fit. Where what a phase holds for certain does not fit, nothing
    is compiled.

    Args:
        config: the settings.
        topology: the devices.
        tell: called with a line for each candidate.

    Returns:
        The candidates: fitting ones first, then those with the fewest devices that exchange activations in every layer,
        then the fewest gathers of parameters, by larger micro-batches.

    Raises:
        UserError: if all are refused for one and the same reason.
    """
    tried: list[Tried] = []
    longest = -(-config.max_total_tokens // _ROW_MULTIPLE) * _ROW_MULTIPLE
    for mesh in candidates(len(topology.devices), model_of(config).num_experts > 0):
        for rows in _ROWS:
            tokens = rows * longest
            training = dataclasses.replace(config.training, micro_batch_tokens=tokens)
            changed = dataclasses.replace(config, mesh=mesh, training=training)
            try:
                one = Tried(mesh, tokens, compile_run(changed, topology, only=("step",), refuse=True))
            except UserError as error:
                one = Tried(mesh, tokens, None, str(error))
            tried.append(one)
            result = one.refused or f"{one.peak / GIB:.2f} GiB{'' if one.fits else ', does not fit'}"
            tell(f"fsdp {mesh.fsdp}, tensor {mesh.tensor}, expert {mesh.expert}, {tokens} tokens a device: {result}")
            if not one.fits:
                break
    if len({one.refused for one in tried}) == 1 and tried[0].plan is None:
        raise UserError(tried[0].refused)
    return sorted(tried, key=lambda one: (not one.fits, one.mesh.tensor * one.mesh.expert, -one.micro_batch_tokens))


def candidates(devices: int, experts: bool) -> Iterator[MeshSettings]:
    """Meshes to try, the ones without a tensor axis first."""
    for expert in _WAYS if experts else (1,):
        for tensor in _WAYS:
            if devices % (expert * tensor) == 0:
                yield MeshSettings(data=1, fsdp=devices // (expert * tensor), tensor=tensor, expert=expert)

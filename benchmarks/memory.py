"""Memory of the training step against sequence length and number of devices, from the compiler.

    python -m benchmarks.memory --model Qwen3-0.6B --topologies h100:1,h100:2,h100:4,h100:8 --json memory.json
    python -m benchmarks.memory --topologies v5e:2x2,v5e:2x4,v5e:4x4 --lengths 2048,8192,32768 --plot memory.png

Compiles the step of configs/qwen3_8b.py with the model's published shape, for each topology at one length and for the
largest topology of each kind at every length: rows of that length, one on each device, remat=full, parameters over
fsdp. The arithmetic beside the compiler's figure is that of `bin.train --dry_run`. Needs the extra `plan`, and no
accelerator. A point that `--json` has already is not compiled again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.arguments import at_least_one
from configs import qwen3_8b
from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands.cli import Parser, run_main
from dcmdp_jax.config.settings import Config, from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.page_kit import COLORS, make_figure, style_axes
from dcmdp_jax.plan.published import PUBLISHED
from dcmdp_jax.plan.run_plan import GIB, compile_run
from dcmdp_jax.plan.topologies import Topology, chip_and_count, load_topology, set_environment


class Point(NamedTuple):
    """Memory of one step on each device, in bytes.

    Attributes:
        topology: its name.
        devices, length: their number, and the tokens of a row.
        state: parameters and optimizer.
        temporary, peak: of the compiled step; `peak` is what it would need if it does not fit.
        arithmetic: what `bin.train --dry_run` says of it.
        available: of a device.
        fits: whether the compiler has room for it.
        seconds: of compilation.
    """

    topology: str
    devices: int
    length: int
    state: int
    temporary: int
    peak: int
    arithmetic: int
    available: int
    fits: bool
    seconds: float


def step_config(model: str, length: int) -> Config:
    """The settings of a step on rows of `length` tokens, one on each device.

    Args:
        model: a name of `PUBLISHED`, or "toy" for a fresh small model in float32.
        length: of a row; a quarter of it is the prompt.
    """
    config = qwen3_8b.get_config("local,debug" if model == "toy" else "local")
    if model == "toy":
        config.model.compute_dtype = "float32"
        config.training.prompts_per_step = config.training.prompts_per_mini_batch = 8
    else:
        config.model.path = f"models/{model}"
    config.task.max_prompt_tokens = length // 4
    config.rollout.max_completion_tokens = length - length // 4
    config.training.row_lengths, config.training.micro_batch_tokens = (length,), length
    return from_config_dict(config)


def measure(model: str, topology: Topology, length: int) -> Point:
    """Compile one step."""
    plan = compile_run(step_config(model, length), topology, only=("step",))
    step, usable = plan.programs["step"], plan.usable
    return Point(
        topology=topology.name, devices=plan.run.mesh.size, length=length, state=sum(plan.step.program.held.values()),
        temporary=step.temporary, peak=step.peak, arithmetic=plan.run.memory.total("step", "first"), available=usable,
        fits=step.refused is None and step.peak <= usable, seconds=step.seconds,
    )  # fmt: skip


def points_to_measure(topologies: Sequence[str], lengths: Sequence[int], length: int) -> list[tuple[str, int]]:
    """(topology, length) of every point: all topologies at `length`, the largest of each kind at all lengths."""
    largest: dict[str, str] = {}
    for name in topologies:
        kind = name.partition(":")[0]
        if kind not in largest or chip_and_count(name)[1] > chip_and_count(largest[kind])[1]:
            largest[kind] = name
    wanted = [(name, length) for name in topologies]
    return list(dict.fromkeys(wanted + [(name, one) for name in largest.values() for one in lengths]))


def table(points: Iterable[Point]) -> str:
    """The points as a table in Markdown: GiB of each device, and seconds of compilation."""
    head = "| topology | tokens of a row | parameters, optimizer | temporary | peak | of | by arithmetic | seconds |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for one in sorted(points, key=lambda one: (one.topology.partition(":")[0], one.devices, one.length)):
        peak = f"{one.peak / GIB:.2f}" if one.peak else "-"
        sizes = f"{one.temporary / GIB:.2f} | {peak}" if one.fits else f"does not fit | {peak}"
        lines.append(
            f"| {one.topology} | {one.length:,} | {one.state / GIB:.2f} | {sizes} | {one.available / GIB:.1f} | "
            f"{one.arithmetic / GIB:.2f} | {one.seconds:.0f} |"
        )
    return "\n".join(lines)


def draw(points: Iterable[Point], model: str, length: int) -> Figure:
    """Peak of the compiled step, solid, and the arithmetic, dashed: by length, and by devices at `length`.

    Points that do not fit are crosses.
    """
    points = list(points)
    figure, (by_length, by_devices) = make_figure(10.8, 4.2, f"Memory of a step, {model}", columns=2)
    for index, kind in enumerate(dict.fromkeys(one.topology.partition(":")[0] for one in points)):
        own = [one for one in points if one.topology.startswith(f"{kind}:")]
        most = max(one.devices for one in own)
        at = sorted((one for one in own if one.devices == most), key=lambda one: one.length)
        _curve(by_length, at, lambda one: one.length, f"{most} x {kind}", COLORS[index])
        at = sorted((one for one in own if one.length == length), key=lambda one: one.devices)
        _curve(by_devices, at, lambda one: one.devices, kind, COLORS[index])
    _finish(by_length, "tokens of a row, one row on each device")
    _finish(by_devices, f"devices, rows of {length:,} tokens")
    return figure


def _curve(axes: Axes, points: Sequence[Point], along: Callable[[Point], int], label: str, color: str) -> None:
    x = [along(one) for one in points]
    axes.plot(x, [one.arithmetic / GIB for one in points], color=color, linestyle=(0, (5, 1.5)), linewidth=1)
    found = [one for one in points if one.peak]
    axes.plot([along(one) for one in found], [one.peak / GIB for one in found], color=color, label=label)
    for fits, marker in ((True, "o"), (False, "x")):
        these = [one for one in found if one.fits == fits]
        axes.plot([along(one) for one in these], [one.peak / GIB for one in these], marker, color=color)


def _finish(axes: Axes, label: str) -> None:
    style_axes(axes, x=label, y="GiB of a device; dashed: by arithmetic", legend=True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_ylim(bottom=0)


def main(argv: list[str]) -> None:
    """Compile the points, print the table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*PUBLISHED, "toy"), default="Qwen3-0.6B")
    parser.add_argument("--topologies", type=_topologies, default=_topologies("h100:1,h100:2,h100:4,h100:8"))
    parser.add_argument("--lengths", type=_lengths, default=_lengths("2048,4096,8192,16384,32768"))
    parser.add_argument("--length", type=at_least_one, default=8192, help="of the rows where devices are compared")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every point; written again after each")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the two figures")
    arguments = parser.parse_args(argv[1:])
    set_environment()
    points: dict[tuple[str, int], Point] = {}
    if arguments.json and arguments.json.is_file():
        saved = json.loads(arguments.json.read_text(encoding="utf-8"))
        if saved["model"] == arguments.model:
            points = {(one["topology"], one["length"]): Point(**one) for one in saved["points"]}
    for name, length in points_to_measure(arguments.topologies, arguments.lengths, arguments.length):
        if (name, length) in points:
            continue
        print(f"compiling for {name}, rows of {length:,} tokens ...", flush=True)
        points[name, length] = measure(arguments.model, load_topology(name), length)
        if arguments.json:
            record = {"model": arguments.model, "points": [one._asdict() for one in points.values()]}
            atomic_write(arguments.json, json.dumps(record, indent=1) + "\n")
    print(f"\n{arguments.model}, GiB of each device; seconds of compilation\n\n{table(points.values())}")
    if arguments.plot:
        draw(points.values(), arguments.model, arguments.length).savefig(arguments.plot, dpi=110)


def _topologies(text: str) -> list[str]:
    try:
        for name in (names := text.split(",")):
            chip_and_count(name)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def _lengths(text: str) -> list[int]:
    return [at_least_one(one) for one in text.split(",")]


if __name__ == "__main__":
    run_main(main)

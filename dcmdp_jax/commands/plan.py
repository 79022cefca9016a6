"""Memory of a run at full size, from its own programs, compiled without an accelerator.

    dcmdp plan --config=configs/qwen3_8b.py --topology=v5p:4x4x4
    dcmdp plan --config=configs/qwen3_8b.py --topology=h100:8 --config.mesh.tensor=2 \
        --json=plan.json
    dcmdp plan --config=configs/qwen3_8b.py --topology=v5e:4x4 --search

Prints memory by kind and what fits; docs/plan.md explains it. What the programs communicate and
compute: `python -m benchmarks.compiled`.
`pip install -e '.[plan]'` installs the compilers.
"""

import dataclasses
import functools
import json

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands import flags, parsers
from dcmdp_jax.config import load, settings
from dcmdp_jax.errors import UserError, suggestion
from dcmdp_jax.plan.plan_text import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import PROGRAMS, check_run, compile_run, search, search_record, table
from dcmdp_jax.plan.topologies import (
    chip_and_count,
    known_topologies,
    load_topology,
    platform_of,
    set_environment,
)


def main(argv: list[str]) -> int:
    """Parse the arguments (program name first), compile, print; exit code 1 if it does not fit."""
    arguments = flags.parse_with(parsers.plan(), argv)
    config = arguments.config
    if config.supervised:
        config = load.for_supervision(config)
    if arguments.topology is None:
        raise UserError(f"--topology is missing; known are {known_topologies()}")
    if arguments.programs and arguments.search:
        raise UserError(
            "--programs: got with --search, which compiles the step alone; give one of the two"
        )
    programs = tuple(name for name in arguments.programs.split(",") if name)
    for name in programs:
        if name not in PROGRAMS:
            raise UserError(
                f"--programs: got {name!r}, allowed are {', '.join(PROGRAMS)}"
                f"{suggestion(name, PROGRAMS)}"
            )

    _, devices = chip_and_count(arguments.topology)
    checked_config = config
    if arguments.search:
        # A search tries meshes of its own.
        checked_config = dataclasses.replace(config, mesh=settings.MeshSettings())
    check_run(checked_config, platform_of(arguments.topology), devices)
    set_environment()
    topology = load_topology(arguments.topology)
    tell = functools.partial(print, flush=True)

    if arguments.search:
        plans = search(config, topology, tell=tell)
        record = search_record(plans)
        fits = any(plan.fits for plan in plans)
        tell(table(plans))
    else:
        plan = compile_run(
            config,
            topology,
            only=programs,
            on_program=lambda name: tell(f"compiling {name} ..."),
        )
        record = plan_record(plan)
        fits = plan.fits
        tell(describe_plan(plan))
    if arguments.json is not None:
        atomic_write(arguments.json, json.dumps(record, indent=2) + "\n")
        tell(f"wrote {arguments.json}")
    return int(not fits)

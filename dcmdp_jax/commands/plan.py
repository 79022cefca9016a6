"""Memory of a run at full size, from its own programs, compiled without an accelerator.

    dcmdp plan --config=configs/qwen3_8b.py --topology=v5p:4x4x4
    dcmdp plan --config=configs/qwen3_8b.py --topology=h100:8 --config.mesh.tensor=2 \
        --json=plan.json

Prints memory by kind and what fits; docs/plan.md explains it. What the programs communicate and
compute: `python -m benchmarks.compiled`.
`pip install -e '.[plan]'` installs the compilers.
"""

import functools
import json

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.commands import flags, parsers
from dcmdp_jax.config import load
from dcmdp_jax.errors import UserError, suggestion
from dcmdp_jax.plan.plan_text import describe_plan, plan_record
from dcmdp_jax.plan.run_plan import PROGRAMS, check_run, compile_run
from dcmdp_jax.plan.topologies import (
    chip_and_count,
    known_topologies,
    load_topology,
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
    programs = [name for name in arguments.programs.split(",") if name]
    for name in programs:
        if name not in PROGRAMS:
            raise UserError(
                f"--programs: got {name!r}, allowed are {', '.join(PROGRAMS)}"
                f"{suggestion(name, PROGRAMS)}"
            )

    chip, devices = chip_and_count(arguments.topology)
    check_run(config, chip.platform, devices)
    set_environment()
    topology = load_topology(arguments.topology)
    tell = functools.partial(print, flush=True)

    plan = compile_run(
        config,
        topology,
        only=programs,
        on_program=lambda name: tell(f"compiling {name} ..."),
    )
    tell(describe_plan(plan))
    if arguments.json is not None:
        atomic_write(arguments.json, json.dumps(plan_record(plan), indent=2) + "\n")
        tell(f"wrote {arguments.json}")
    return int(not plan.fits)

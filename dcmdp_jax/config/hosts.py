"""Settings of a run on several hosts, declared once each as in `config/settings.py`, of which they are a part."""

from __future__ import annotations

import dataclasses

from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import setting
from dcmdp_jax.inputs import shorten

# A test compares it with the name in `parallel/hosts.py`; importing that would import JAX.
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class HostSettings:
    """Several hosts, one process on each (docs/several_hosts.md). All run the same command."""

    coordinator: str = setting(
        "",
        "Address of process 0, host:port, with a port that is free there. auto: this and the next two are what JAX "
        "finds out from SLURM, a TPU pod or Open MPI. Empty: one process.",
        free=True,
    )  # fmt: skip
    processes: int = setting(1, "Processes of the run.", minimum=1, free=True)
    process: int = setting(0, "Number of this process, from 0. The only setting that differs.", minimum=0, free=True)
    timeout_s: float = setting(
        30.0, "A process that has not come for this long at the start, or later gives no sign of life, is taken for "
        "dead, and all others end.",
        unit="seconds", source="ours", minimum=2, free=True,
    )  # fmt: skip


def check_hosts(hosts: HostSettings, prompts_per_step: int) -> None:
    """Check the rules between the settings of several hosts.

    Raises:
        UserError: in one line, naming setting, value and what is allowed.
    """
    if not hosts.coordinator:
        if hosts.processes > 1 or hosts.process:
            raise UserError(
                f"config.hosts.coordinator: empty, with {hosts.processes} processes; give host:port of process 0, or "
                "auto"
            )
        return
    if hosts.coordinator == AUTO:
        return
    name, _, port = hosts.coordinator.rpartition(":")
    if not name or not port.isdecimal() or not port.isascii() or not 0 < int(port) < 65536:
        raise UserError(f"config.hosts.coordinator: got {shorten(hosts.coordinator)}, must be host:port, or auto")
    if hosts.process >= hosts.processes:
        raise UserError(f"config.hosts.process: got {hosts.process}, must be below hosts.processes={hosts.processes}")
    if prompts_per_step < hosts.processes:
        raise UserError(
            f"config.training.prompts_per_step: got {prompts_per_step}, must be at least hosts.processes="
            f"{hosts.processes}: each samples its share"
        )

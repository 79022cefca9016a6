"""A run, as the top of a command has it: task, placement and weights, checked by cost."""

import dataclasses
from datetime import datetime
from pathlib import Path

from dcmdp_jax.config.settings import Config
from dcmdp_jax.observe import jsonl, trackers
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.run.directory import check_run_directory, first_start, fitted_rows
from dcmdp_jax.run.placement import Placement, place, trainable_engine
from dcmdp_jax.run.services import Services, start_services
from dcmdp_jax.run.task import Task, read_task
from dcmdp_jax.run.weights import Weights, model_shardings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The values that training takes.

    Attributes:
        task: what the policy is trained on, with the settings.
        placement: where the run computes.
        weights: what it starts from.
    """

    task: Task
    placement: Placement
    weights: Weights

    @classmethod
    def check(cls, config: Config, hosts: Hosts = ONE_PROCESS) -> "Run":
        """Check all that can be checked without touching weights or compiling, the cheapest first.

        Args:
            config: the settings.
            hosts: the processes of the run; each has a `Run`.

        Raises:
            UserError: in one line naming setting or file, value and remedy.
            OSError: for directories and files that can't be read or written.
        """
        check_run_directory(config)
        observe = config.observe
        projects = {"wandb": observe.wandb_project, "trackio": observe.trackio_project}
        for kind, project in projects.items():
            if project:
                trackers.require_tracker(kind, project)
        rows = fitted_rows(config)
        kind, engine_platform = trainable_engine(config)
        # Hosts may be in several time zones, and start at midnight.
        started = hosts.gather(first_start(Path(config.run_dir)).isoformat())[0]
        task = read_task(config, datetime.fromisoformat(started))
        placement = place(
            task,
            kind=kind,
            engine_platform=engine_platform,
            hosts=hosts,
            fitted_rows=rows,
        )
        placement.engine.memory.check()
        shardings = model_shardings(task.model, placement.mesh)
        weights = Weights(
            task=task,
            shardings=shardings,
            settings=config.model,
            seed=config.training.seed,
            reference=Path(config.run_dir) / "reference",
            has_kl=config.algorithm.kl_coefficient > 0,
        )
        return cls(task=task, placement=placement, weights=weights)

    def start(self) -> Services:
        """Start the run's services, see `start_services`."""
        output = Path(self.task.config.run_dir) / jsonl.rewards_log(self.placement.hosts.index)
        return start_services(self.task, self.placement.engine, output=output)

"""The state that training begins from: a checkpoint's, or a fresh or warmed-up one."""

import dataclasses
import logging
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from dcmdp_jax.activity import activity
from dcmdp_jax.models.params import logical_axes
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.run.checkpoint import Checkpoints, needed_by
from dcmdp_jax.run.run import Run
from dcmdp_jax.training import exit, warmup
from dcmdp_jax.training.state import initial_dual
from dcmdp_jax.training.step_programs import StepPrograms
from dcmdp_jax.types import Params, TrainState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts.

    Attributes:
        state: the state.
        resumed: whether it is a checkpoint's.
        prompts_taken: position in the stream of prompts where its next step begins.
    """

    state: TrainState
    resumed: bool
    prompts_taken: int


def start(
    run: Run,
    programs: StepPrograms,
    checkpoints: Checkpoints,
    *,
    stop: exit.StopSignal,
    check: Callable[[], None],
    show: Callable[[str], None],
) -> Start:
    """The newest checkpoint's state, or a fresh one, warmed up if asked.

    Args:
        run: the settings, the model, the weights, and the worked solutions of the warm-up.
        programs: the step's programs.
        checkpoints: the run's checkpoints.
        stop: ends the warm-up.
        check: raises what should end the warm-up, an engine that does not start.
        show: prints a line for people.

    Raises:
        Interrupted: after a signal to any process of the run, in the warm-up.
        EngineError: from `check`.
        CheckpointError: if there are checkpoints and none can be read.
    """
    task = run.task
    weights = run.weights
    config = task.config
    abstract = programs.arguments[0]
    dual = initial_dual(config.algorithm)
    with activity("restoring the newest checkpoint"):
        state = checkpoints.restore(abstract, task.model)
    if state is not None:
        step = int(state.step)
        for name in TrainState._field_defaults:
            if getattr(state, name) is None and getattr(abstract, name) is not None:
                logger.warning(
                    "checkpoint %d has no %s (%s): it begins as in a new run",
                    step,
                    name,
                    needed_by(name),
                )
                new = programs.create(state.params, dual)
                state = state._replace(**{name: getattr(new, name)})
        if config.model.path:
            _warn_of_changed_model(Path(config.model.path), task.started)
        checkpoints.check_problems(step, may_change=config.task.on_changed_data == "continue")
        show(f"resuming {config.run_dir} after step {step}")
        prompts_taken = checkpoints.prompts_taken(step)
        if prompts_taken is None:
            prompts_taken = step * config.training.prompts_per_step
        return Start(state=state, resumed=True, prompts_taken=prompts_taken)

    path = config.model.path
    with activity(f"loading the weights of {path}" if path else "drawing fresh weights"):
        params = weights.initial()
    if config.warmup.steps:
        params = _warm_up(run, params, stop, check, show)
    if weights.saves_initial:
        with activity("saving the initial policy"):
            weights.save_initial(params, run.placement.hosts)
    with activity("making the optimizer's state"):
        if task.lora:
            params = weights.initial_adapters(programs.shardings.params)
        return Start(state=programs.create(params, dual), resumed=False, prompts_taken=0)


def _warn_of_changed_model(directory: Path, started: datetime) -> None:
    """Say that a resumed run does not take up weights that were written since it began."""
    changes = [file.stat().st_mtime for file in directory.glob("*.safetensors")]
    if max(changes, default=0) > started.timestamp():
        logger.warning(
            "%s has changed since this run began, which goes on with its own weights; another "
            "run_dir begins with the new ones",
            directory,
        )


def _warm_up(
    run: Run,
    params: Params,
    stop: exit.StopSignal,
    check: Callable[[], None],
    show: Callable[[str], None],
) -> Params:
    task = run.task
    settings = task.config.warmup
    placement = run.placement
    mesh = placement.mesh
    compute = placement.compute
    show(f"SFT warm start: {settings.steps} supervised steps on {settings.task}")
    # The sampling temperature belongs to sampling: solutions are fitted by the model as it is.
    row_logprobs = make_row_logprobs(task.model, compute, temperature=1.0, mesh=mesh)
    began = time.monotonic()

    def on_step(step: int, loss: float) -> None:
        progress.done = step
        check()
        [signal_number] = placement.hosts.largest(stop.received or 0)
        if signal_number:
            raise exit.Interrupted(int(signal_number), "in the SFT warm start, which starts again")
        if step % 500 == 0 or step == settings.steps:
            seconds = time.monotonic() - began
            show(f"SFT warm start: step {step}, loss {loss:.4f} nats a token, {seconds:.0f} s")

    with activity("SFT warm start (it compiles first)", settings.steps, "steps") as progress:
        return warmup.warm_up(
            params,
            logical_axes(task.model),
            warmup.lay_out(task.worked_solutions, 128 if compute.attention == "splash" else 8),
            row_logprobs,
            settings,
            seed=task.config.training.seed,
            mesh=mesh,
            on_step=on_step,
        )

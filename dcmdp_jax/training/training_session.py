"""What both training loops work in: a claimed run directory, its checkpoints and its records."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from dcmdp_jax.activity import activity
from dcmdp_jax.data.prompts import digest_of
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.metrics_io import MetricsWriter, NoWriter, has_record
from dcmdp_jax.observe.progress import Progress
from dcmdp_jax.run import checkpoint, directory
from dcmdp_jax.run.facts import data_facts
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.exit import ENDS_A_RUN, CollectiveExit, StopSignal
from dcmdp_jax.training.phase_timer import KEPT_BYTES
from dcmdp_jax.training.start import Start, start
from dcmdp_jax.training.step_programs import StepPrograms
from dcmdp_jax.types import Params, TrainState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, kw_only=True)
class TrainingSession:
    """The state after the last finished step, and where it is saved and recorded.

    Attributes:
        run: what is trained, and where it computes.
        programs: the step's programs.
        checkpoints: the run's checkpoints.
        stop: knows of a signal to this process.
        writer: gets metrics and samples.
        frozen: the base of the adapters, or the reference policy; None without.
        wait_until_compiled: collective, waits for the programs that are being compiled.
        beginning: the state that it begins with.
        older_params: called with the number of finished steps, gives the older parameters that
            sampled what is in flight, by version.
        state: after the last finished step.
        step: how many steps are finished.
        prompts_taken: position in the stream of prompts where the next step begins.
        last_step: number of the step after which the run ends.
    """

    run: Run
    programs: StepPrograms
    checkpoints: checkpoint.Checkpoints
    stop: StopSignal
    writer: MetricsWriter | NoWriter
    frozen: Params | None
    wait_until_compiled: Callable[[], None]
    beginning: Start
    older_params: Callable[[int], dict[int, Params]] = lambda step: {}

    def __post_init__(self) -> None:
        self.config = self.run.task.config
        self.last_step = self.config.training.steps
        self.hosts = self.run.placement.hosts
        self.state = self.beginning.state
        self.step = int(self.state.step)
        self.prompts_taken = self.beginning.prompts_taken
        self._first_step = self.step
        self.stop.nothing_to_lose = self._nothing_to_lose
        self.exit = CollectiveExit(self.hosts, self.stop, functools.partial(self.save, wait=True))

    def _nothing_to_lose(self) -> bool:
        """Whether this process may leave at once: the state that it began with is on disk.

        Until its first step is done programs compile; later on the step that runs would be lost.
        """
        if self.hosts.count > 1 or self.step > self._first_step:
            return False
        return self.checkpoints.has(self.step)

    def leave_if_asked(self) -> None:
        """Collective: save and raise `Interrupted` after a signal to any process of the run."""
        with self.exit.scope():
            self.exit.check()

    def finish_step(self, state: TrainState, *, prompts: int) -> None:
        """Take the state after one more step, for which `prompts` of the stream were taken."""
        self.state = state
        self.step += 1
        self.prompts_taken += prompts

    def save(self, *, wait: bool = False) -> int:
        """Save the state after the last finished step, and wait if asked; return the step."""
        release_freed_memory(above=KEPT_BYTES)
        with activity("saving a checkpoint"):
            self.checkpoints.save(
                self.step,
                self.state,
                model=self.run.task.model,
                prompts_taken=self.prompts_taken,
                behind=self.older_params(self.step),
            )
        if wait:
            self.checkpoints.wait()
        return self.step

    @contextlib.contextmanager
    def keeping_finished_steps(self) -> Iterator[None]:
        """Run the steps; after an error that ends the run, save those that are finished.

        On several hosts saving needs all of them, and only `CollectiveExit` knows that all leave.
        It has saved then.

        Raises:
            EngineError, MemoryError, JaxRuntimeError: with a message that ends with what is saved.
        """
        try:
            yield
        except ENDS_A_RUN as error:
            saved = self.checkpoints.latest_step
            alive = not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
            if saved != self.step and alive and self.hosts.count == 1:
                try:
                    saved = self.save(wait=True)
                except Exception as failure:  # whatever it is, the first error is reported
                    logger.warning("step %d was not saved: %s", self.step, failure)
            outcome = "nothing was saved"
            if saved is not None:
                outcome = f"saved after step {saved}: the same command resumes there"
            error.args = (f"{error}; {outcome}",)
            raise

    def begin(self, evaluate: Callable[[], None]) -> None:
        """Save the state that a new run begins with; evaluate, unless the record has that."""
        if not self.beginning.resumed:
            self.save()
        if self._evaluation_is_due():
            # Only process 0 has the record.
            in_record = all(
                has_record(self.config.run_dir, self.step, f"eval/{task.name}/")
                for task, _ in self.run.task.held_out
            )
            [evaluated] = self.hosts.largest(in_record)
            if not evaluated:
                evaluate()

    def save_and_evaluate(self, evaluate: Callable[[], None]) -> None:
        """Save and evaluate the policy after a step where that is due.

        Every evaluated policy is saved, and `evaluate` adds its score, so that the best one can be
        kept.
        """
        evaluates = self._evaluation_is_due()
        last = self.step == self.last_step
        if evaluates or last or self.step % self.config.checkpoint.every_steps == 0:
            self.save()
        if evaluates:
            evaluate()
            release_freed_memory(above=KEPT_BYTES)

    def _evaluation_is_due(self) -> bool:
        """Whether to evaluate: before the first step, every N steps, and after the last."""
        interval = self.config.evaluation.every_steps
        if interval == 0:
            return False
        return self.step % interval == 0 or self.step == self.last_step


@contextlib.contextmanager
def claimed_directory(run: Run) -> Iterator[StopSignal]:
    """Claim the run directory and listen for signals, on all hosts of one run.

    Raises:
        UserError: in one line, if hosts have other files, or another run has the directory.
    """
    hosts = run.placement.hosts
    stop = StopSignal(nothing_to_lose=hosts.count == 1)
    hosts.check_same(lambda: data_facts(run.task), "give all hosts the same files")
    with directory.claimed(run.task.config, hosts), stop.listening():
        yield stop


@contextlib.contextmanager
def open_session(
    run: Run,
    programs: StepPrograms,
    stop: StopSignal,
    *,
    show: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Iterator[TrainingSession]:
    """Begin at the newest checkpoint, or anew; wait for the last checkpoint at the end.

    Args:
        run: what is trained, where, and from which weights.
        programs: the step's programs, which compile while the weights are read.
        stop: result of `claimed_directory`.
        show: prints a line for people.
        check: raises what should end a warm-up, such as an engine that does not start.

    Raises:
        Interrupted: after a signal in the warm-up.
        ValueError, OSError, EngineError: in one line, what is wrong with input, files or engine.
    """
    task = run.task
    weights = run.weights
    config = task.config
    hosts = run.placement.hosts
    with contextlib.ExitStack() as stack:
        checkpoints = checkpoint.Checkpoints(
            config.run_dir,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            hosts=hosts,
            adapters=weights.saved_adapters,
            problems=digest_of(task.train),
        )
        stack.callback(checkpoints.close)

        wait_until_compiled = programs.compile_ahead(hosts)
        beginning = start(run, programs, checkpoints, stop=stop, check=check, show=show)
        release_freed_memory()
        step = int(beginning.state.step)
        if step > config.training.steps:
            raise UserError(
                f"config.training.steps: got {config.training.steps}, the run in {config.run_dir} "
                f"has already done {step}; raise it or choose another run_dir"
            )
        with activity("opening metrics and samples"):
            writer = NoWriter()
            if hosts.is_writer:
                writer = stack.enter_context(_open_records(run, step, resumed=beginning.resumed))

        frozen = None
        if run.placement.frozen is not None:
            with activity("loading the initial policy"):
                frozen = weights.frozen()
                # The checkpoint of `step` has this policy's digests: another one is refused.
                checkpoints.check_reference(frozen, step, weights.frozen_path)
        yield TrainingSession(
            run=run,
            programs=programs,
            checkpoints=checkpoints,
            stop=stop,
            writer=writer,
            frozen=frozen,
            wait_until_compiled=wait_until_compiled,
            beginning=beginning,
        )
        with activity("writing the last checkpoint"):
            checkpoints.wait()


@contextlib.contextmanager
def _open_records(run: Run, step: int, *, resumed: bool) -> Iterator[MetricsWriter]:
    """Write what describes the run, and open what grows with it."""
    task = run.task
    config = task.config
    directory.record_config(config, run.placement.engine.memory.rows)
    save_tokenizer(task.tokenizer, Path(config.run_dir) / "tokenizer", task.stop_token_ids)
    with (
        contextlib.closing(
            Progress(config.training.steps, step, measured_steps=config.algorithm.measured_steps)
        ) as progress,
        contextlib.closing(
            MetricsWriter(
                config.run_dir,
                projects={
                    "wandb": config.observe.wandb_project,
                    "trackio": config.observe.trackio_project,
                },
                resume_step=step if resumed else None,
                devices=run.placement.mesh.size,
                started=task.started,
                listener=progress.update,
                rollouts_every_steps=config.observe.rollouts_every_steps,
            )
        ) as writer,
    ):
        yield writer

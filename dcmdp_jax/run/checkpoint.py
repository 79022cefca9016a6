"""Checkpoints by Orbax: asynchronous, atomic, checked when read; the last few and the best stay.

docs/checkpoints.md says what a checkpoint holds, and how to add to it. `weights.find_params` finds
the parameters alone.
"""

import dataclasses
import heapq
import json
import logging
import math
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import UserError
from dcmdp_jax.models import config, lora
from dcmdp_jax.models.array_checksum import array_checksum
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from dcmdp_jax.run.directory import RUN_ID_FILE, run_id
from dcmdp_jax.types import Params, TrainState

logger = logging.getLogger(__name__)

_BEHIND = "behind"  # the parameters that batches in flight are sampled with
_OF_SETTINGS = {"loss_scale": "model.compute_dtype=float16", "opt_state": "config.optimizer"}


def needed_by(field: str) -> str:
    """What gives a state a field: a setting, or the version."""
    return _OF_SETTINGS.get(field, "another version of the code or of its libraries")


class CheckpointError(UserError):
    """No usable checkpoint."""


@jax.jit
def _digests(tree: Any) -> Any:
    return jax.tree.map(array_checksum, tree)


def digests(tree: Any) -> dict[str, int]:
    """`array_checksum` of every array of a tree, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(_digests(tree)))
    return {jax.tree_util.keystr(path): int(value) for path, value in leaves}


def _copied(state: TrainState) -> TrainState:
    """Copy a state; a replicated one on one device, or Orbax would save a slice from each."""
    for leaf in jax.tree.leaves(state):
        if not (leaf.is_fully_replicated and leaf.is_fully_addressable):
            return _copies(state)
    return _copies(jax.tree.map(lambda leaf: leaf.addressable_shards[0].data, state))


@jax.jit
def _copies(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _learner(state: TrainState) -> dict[str, Any]:
    """All but the parameters; without a loss scale where there is none."""
    fields = state._asdict()
    del fields["params"]
    return {name: value for name, value in fields.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class PolicyScore:
    """The score that the best checkpoints are chosen by: the highest, among those of one name."""

    name: str
    value: float


@dataclasses.dataclass
class _BestScores(preservation_policy.PreservationPolicy):
    """Keeps the `count` checkpoints of the highest score, the newer of two equal; never NaN.

    Only scores with the name of the newest count: numbers of another evaluation are not comparable.
    """

    directory: Path
    count: int

    def should_preserve(
        self,
        checkpoints: Sequence[preservation_policy.PolicyCheckpointInfo],
        *,
        context: preservation_policy.PreservationContext,
    ) -> list[bool]:
        scores = []
        for index, info in enumerate(checkpoints):
            score = _read_score(self.directory / str(info.step))
            if score is not None and not math.isnan(score.value):
                scores.append((score, index))

        # Checkpoints come oldest first, so the last score is the newest, and of two equal scores the
        # newer has the larger index.
        ranked = []
        for score, index in scores:
            newest, _ = scores[-1]
            if score.name == newest.name:
                ranked.append((score.value, index))
        best = {index for _, index in heapq.nlargest(self.count, ranked)}
        return [index in best for index in range(len(checkpoints))]


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        keep_last: int,
        keep_best: int,
        hosts: Hosts = ONE_PROCESS,
        adapters: lora.SavedAdapters | None = None,
        problems: str = "",
    ) -> None:
        """Open `run_dir`/checkpoints, made if needed, without a save that a kill left unfinished.

        Args:
            run_dir: the run directory.
            keep_last: number of the newest to keep.
            keep_best: number of those with the highest score to keep besides.
            hosts: the processes of the run. Each calls every method; each array is written by its
                holders.
            adapters: record of the states' parameters, if they are adapters.
            problems: number and digest of the problems that the run trains on, for
                `check_problems`.
        """
        self._hosts = hosts
        self._adapters = adapters
        self._problems = problems
        self._directory = Path(run_dir).resolve() / "checkpoints"
        self._reference: dict[str, int] | None = None
        self.behind: dict[int, Params] = {}
        """Of the checkpoint that `restore` read: version -> parameters of the batches in flight."""
        if hosts.is_writer:
            saved_steps(self._directory)
            _drop_unreadable_scores(self._directory)
            run_id(Path(run_dir))  # made by one host
        hosts.wait_for_all()
        self._run = run_id(Path(run_dir))
        keep = preservation_policy.AnyPreservationPolicy(
            [preservation_policy.LatestN(keep_last), _BestScores(self._directory, keep_best)]
        )
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_names=("params", "learner", "meta", _BEHIND),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep, cleanup_tmp_directories=True
            ),
        )

    def save(
        self,
        step: int,
        state: TrainState,
        *,
        model: config.ModelConfig,
        prompts_taken: int | None = None,
        behind: Mapping[int, Params] = MappingProxyType({}),
    ) -> None:
        """Start writing the state after `step` steps; return when the arrays may be donated.

        Args:
            step: finished training steps; nothing happens if that step is saved already.
            state: the state.
            model: the model's shape, so that the parameters can be loaded alone.
            prompts_taken: position in the stream of prompts where the next step begins.
            behind: version -> parameters that the batches in flight are sampled with: sampling is a
                function of weights, seed and step, so a resumed run samples them again.

        Raises:
            CheckpointError: if there is a later one, which Orbax would keep in its place.
        """
        newest = self._manager.latest_step()
        if newest == step:
            return
        if newest is not None and newest > step:
            raise CheckpointError(
                f"{self._directory}: {newest} is later than step {step}, which is not saved; move "
                "it"
            )
        if jax.default_backend() == "cpu":
            # A host view shares memory with the array, which the next step would overwrite.
            state = _copied(state)
        learner = _learner(state)
        meta = {
            "step": step,
            "model": dataclasses.asdict(model),
            "param_dtype": str(jax.tree.leaves(state.params)[0].dtype),
            "digests": {"params": digests(state.params), "learner": digests(learner)},
            "prompts_taken": prompts_taken,
            "run": self._run,
            "problems": self._problems,
        }
        if self._adapters is not None:
            meta["adapters"] = dataclasses.asdict(self._adapters)
        if self._reference is not None:
            meta["digests"]["reference"] = self._reference
        items = {
            "params": ocp.args.StandardSave(state.params),
            "learner": ocp.args.StandardSave(learner),
        }
        if behind:
            versions = {str(version): params for version, params in behind.items()}
            items[_BEHIND] = ocp.args.StandardSave(versions)
            meta["digests"][_BEHIND] = {
                version: digests(params) for version, params in versions.items()
            }
        meta["crc32"] = _record_checksum(meta)
        items["meta"] = ocp.args.JsonSave(meta)
        self._manager.save(step, args=ocp.args.Composite(**items))

    def add_score(self, step: int, score: PolicyScore) -> None:
        """Make a saved step a candidate for the best; a kill leaves the old score or the new.

        Args:
            step: a saved step.
            score: the criterion for the best; replaces an earlier one.
        """
        self.wait()
        if self._hosts.is_writer:
            path = self._directory / str(step) / "metrics" / "metrics"
            path.parent.mkdir(exist_ok=True)
            saved = {"name": score.name, "score": float(score.value), "step": step}
            atomic_write(path, json.dumps(saved | {"crc32": _record_checksum(saved)}))
        self._hosts.wait_for_all()

    def check_reference(self, reference: Params, step: int, source: Path) -> None:
        """Record the digests of the frozen parameters; compare them with a saved step's.

        Args:
            reference: the frozen parameters, as they were loaded.
            step: step of the checkpoint that the run goes on from.
            source: their directory, for the error.

        Raises:
            CheckpointError: in one line, if it is not the policy that the run began with.
        """
        self._reference = digests(reference)
        if step not in self._manager.all_steps():
            return
        recorded = self._meta(step)["digests"].get("reference")
        if recorded is not None and recorded != self._reference:
            changed = first_changed(self._reference, recorded)
            raise CheckpointError(
                f"{source}: {changed} is not what the run began with (its digest is in "
                f"checkpoint {step}); put the initial policy back, or choose another run_dir"
            )

    @property
    def latest_step(self) -> int | None:
        """The newest saved step; None if there is none."""
        return self._manager.latest_step()

    def has(self, step: int) -> bool:
        """Whether that step is on disk, for any thread."""
        return self._manager.latest_step() == step and not self._manager.is_saving_in_progress()

    def restore(self, abstract: TrainState, model: config.ModelConfig) -> TrainState | None:
        """Load the newest undamaged state; None if the run has no checkpoint.

        A damaged checkpoint is skipped for the one before it, and moved to `damaged/` once that one
        was read: if none can be read, the cause may be elsewhere (a missing disk), and nothing is
        changed.

        Args:
            abstract: the state's shapes, dtypes and shardings.
            model: the shape of the model; a checkpoint of another model is an error, not damage.

        Raises:
            CheckpointError: if there are checkpoints and none can be read, or one is of another
                model or run.
            JaxRuntimeError, MemoryError: if the state does not fit in memory.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        damaged: dict[int, str] = {}
        for step in steps:
            try:
                state = self._read(step, abstract, model)
            except (CheckpointError, jax.errors.JaxRuntimeError, MemoryError):
                raise
            except Exception as error:  # Orbax raises any error of the storage layer
                damaged[step] = first_line(error)
                continue
            for broken, reason in damaged.items():
                logger.warning(
                    "checkpoint %d of %s is damaged (%s); going on from step %d",
                    broken,
                    self._directory,
                    reason,
                    step,
                )
                if self._hosts.is_writer:
                    self._move_aside(broken)
            if damaged:
                self._hosts.wait_for_all()
                self._manager.reload()
            return state
        if steps:
            raise CheckpointError(
                f"{self._directory}: none of the checkpoints {steps[::-1]} can be read "
                f"({steps[0]}: {damaged[steps[0]]}); no files were modified; repair them or use a "
                "new run_dir"
            )
        return None

    def check_problems(self, step: int, *, may_change: bool) -> None:
        """Compare the problems to train on with a saved step's.

        Args:
            step: step of the checkpoint that the run goes on from.
            may_change: whether to go on with other ones, with a warning.

        Raises:
            CheckpointError: in one line, if they differ and may not.
        """
        saved_problems = self._meta(step)["problems"]
        if saved_problems == self._problems:
            return
        change = (
            f"config.task.train: has {self._problems} (number, digest), the run began with "
            f"{saved_problems} (checkpoint {step}): prompts are asked in another order"
        )
        if not may_change:
            raise CheckpointError(
                f"{change}; put the data back, or set --config.task.on_changed_data=continue"
            )
        logger.warning(change)

    def prompts_taken(self, step: int) -> int | None:
        """Position in the stream of prompts of a readable checkpoint; None if it has none."""
        return self._meta(step).get("prompts_taken")

    def _meta(self, step: int) -> dict[str, Any]:
        meta = ocp.args.Composite(meta=ocp.args.JsonRestore())
        return self._manager.restore(step, args=meta)["meta"]

    def _read(self, step: int, abstract: TrainState, model: config.ModelConfig) -> TrainState:
        """Read a checkpoint; an error in any process is one in all, so that all go on alike."""
        failure = restored = saved = None
        try:
            saved, restored = self._read_own_part(step, abstract, model)
        except Exception as error:
            failure = error
        [failures] = self._hosts.largest(failure is not None)
        if failures:
            raise failure or ValueError("another host can't read it")
        for item in ("params", "learner"):
            check_digests(restored[item], saved["digests"][item])
        self.behind = {}
        for version, expected in saved["digests"].get(_BEHIND, {}).items():
            self.behind[int(version)] = restored[_BEHIND][version]
            check_digests(restored[_BEHIND][version], expected)
        return TrainState(params=restored["params"], **restored["learner"])

    def _read_own_part(
        self,
        step: int,
        abstract: TrainState,
        model: config.ModelConfig,
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        saved = self._meta(step)
        check_record(saved, step)
        if saved.get("run", self._run) != self._run:
            raise CheckpointError(
                f"{self._directory / str(step)}: it is of run {saved['run']}, this directory is "
                f"of run {self._run} ({RUN_ID_FILE}); move that checkpoint away, or choose "
                "another run_dir"
            )

        own_model = json.loads(json.dumps(dataclasses.asdict(model)))
        for name, value in saved["model"].items():
            if value != own_model[name]:
                raise CheckpointError(
                    f"{self._directory / str(step)}: its model has {name}={value!r}, this "
                    f"config's has {own_model[name]!r}; choose another run_dir"
                )

        items = {"params": abstract.params, "learner": _learner(abstract)}
        for name in TrainState._field_defaults:
            if not any(path.startswith(f"['{name}']") for path in saved["digests"]["learner"]):
                items["learner"].pop(name, None)
        for item in ("params", "learner"):
            check_structure(self._directory / str(step), item, saved["digests"][item], items[item])

        versions = saved["digests"].get(_BEHIND)
        if versions:
            items[_BEHIND] = dict.fromkeys(versions, abstract.params)
        restores = {name: ocp.args.StandardRestore(tree) for name, tree in items.items()}
        return saved, self._manager.restore(step, args=ocp.args.Composite(**restores))

    def _move_aside(self, step: int) -> None:
        damaged = self._directory / "damaged"
        damaged.mkdir(exist_ok=True)
        number = 1
        while (damaged / f"{step}-{number}").exists():
            number += 1
        (self._directory / str(step)).rename(damaged / f"{step}-{number}")

    def wait(self) -> None:
        """Return when everything saved is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for pending saves and release the directory."""
        self._manager.close()


def saved_steps(directory: Path) -> list[int]:
    """The steps of a directory of checkpoints, rising: directories named by their number.

    A file, and a number written otherwise (`007`), are none: Orbax passes over them. A warning
    names each.

    Raises:
        CheckpointError: in one line, if there are such, and no step.
    """
    steps = []
    unusable_paths = []
    for path in sorted(directory.glob("[0-9]*")):
        if path.name.isascii() and path.name.isdigit():
            if path.is_dir() and path.name == str(int(path.name)):
                steps.append(int(path.name))
            else:
                unusable_paths.append(path)
    steps.sort()
    for path in unusable_paths:
        reason = "it is no directory"
        if path.is_dir():
            reason = f"its name is not {int(path.name)}"
        problem = f"{path} is no checkpoint, {reason}"
        if not steps:
            raise CheckpointError(
                f"{problem}; there is no other: put the checkpoint back under its name, or move it "
                "away"
            )
        logger.warning(
            "%s: move it away; the newest checkpoint here is that of step %d", problem, steps[-1]
        )
    return steps


def _read_score(checkpoint: Path) -> PolicyScore | None:
    """The score in a checkpoint's directory; None without one that was written for that step."""
    try:
        saved = json.loads((checkpoint / "metrics" / "metrics").read_text(encoding="utf-8"))
        check_record(saved, int(checkpoint.name))
        return PolicyScore(saved["name"], saved["score"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def _drop_unreadable_scores(directory: Path) -> None:
    """Delete damaged scores: Orbax reads all, and fails on one that a power cut emptied."""
    for path in directory.glob("[0-9]*/metrics"):
        if _read_score(path.parent) is None:
            logger.warning(
                "%s is damaged: that checkpoint is no longer a candidate for the best", path
            )
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_structure(checkpoint: Path, item: str, saved: Mapping[str, int], tree: Any) -> None:
    """Refuse a checkpoint whose arrays are other ones than the code has now: that is not damage.

    Args:
        checkpoint, item, saved: its directory, "params" or "learner", and the digests of its arrays
            by path.
        tree: the arrays that the code has now.

    Raises:
        CheckpointError: in one line, with the first array that only one of the two has.
    """
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
    for name in sorted(names ^ saved.keys()):
        cause = needed_by(name.split("'")[1])
        difference = f"has {item}{name}, which this run does not have"
        if name in names:
            difference = f"has no {item}{name}, which this run needs"
        raise CheckpointError(
            f"{checkpoint}: {difference} ({cause}); nothing is "
            "damaged: go on with the settings and the version that wrote it, or export it (dcmdp "
            "convert export) and start from that"
        )


def check_digests(tree: Any, expected: Mapping[str, int]) -> None:
    """Raise ValueError for the first array whose digest is not the expected one."""
    changed = first_changed(expected, digests(tree))
    if changed is not None:
        raise ValueError(f"digest of {changed} does not match what was saved")


def first_changed(expected: Mapping[str, int], actual: Mapping[str, int]) -> str | None:
    """The path of the first digest that is not the expected one; None if there is none."""
    for path, value in expected.items():
        if actual.get(path) != value:
            return path
    return None


def _record_checksum(meta: Mapping[str, Any]) -> int:
    fields = {name: value for name, value in meta.items() if name != "crc32"}
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def check_record(meta: Mapping[str, Any], step: int) -> None:
    """Raise ValueError for a record that does not match its checksum, or is of another step."""
    if meta["crc32"] != _record_checksum(meta):
        raise ValueError("its record does not match its checksum")
    if meta["step"] != step:
        raise ValueError(f"it was saved as that of step {meta['step']}")


def first_line(error: Exception) -> str:
    """The first line of an error of the storage layer, cut."""
    # Orbax goes on with the `repr` of a method.
    text, _, _ = str(error).partition(" See full TensorStore details")
    return (text.strip() or type(error).__name__).splitlines()[0][:200]

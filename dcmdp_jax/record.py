"""Record what another trainer saw, for `dcmdp probe`. Needs NumPy alone.

    recorder = Recorder("recordings", "trl", rank=rank)
    recorder.write(step, token_ids, train_logprobs, rollout_logprobs, mask, advantages=advantages)

writes recordings/step_N/rank_R.jsonl, one completion a line; `dcmdp probe recordings` reads it.
`record_trl`, `record_verl` and `record_skyrl` take what these frameworks have at hand
(docs/probe.md has the place to call them). The file may also be copied into another project.
"""

import base64
import json
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1
Batch = Mapping[str, Any]
"""What a framework calls a column -> its values."""


class Recorder:
    """Writes the tokens of a run, each step into a file of its own for each rank.

    The first call for a step replaces what an earlier attempt of the run left in its file; further
    ones append. Later steps of an earlier attempt stay, with a warning: the probe would read them
    with this run's.

    Args:
        directory: made if absent; the same for all ranks.
        framework: "trl", "verl" or "skyrl", or a name of your own.
        rank: rank of this process, from 0.

    Raises:
        ValueError: if `framework` is empty or `rank` is negative.
    """

    def __init__(self, directory: str | Path, framework: str, *, rank: int = 0) -> None:
        if not framework or rank < 0:
            raise ValueError(
                f"framework is {framework!r}, rank is {rank}: allowed are a name and a number "
                "from 0"
            )
        self._directory = Path(directory)
        self._framework = framework
        self._rank = int(rank)
        self._begun: set[int] = set()
        self._top: int | None = None

    def write(
        self,
        step: int,
        token_ids: Any,
        train_logprobs: Any,
        rollout_logprobs: Any,
        mask: Any = None,
        *,
        entropies: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        groups: Sequence[Any] | None = None,
        sources: Sequence[str] | None = None,
        lags: Any = None,
        top: tuple[Any, Any, Any] | None = None,
    ) -> None:
        """Write the completions of a batch.

        Args:
            step: training step, from 0.
            token_ids: [N, T] integers; here and below NumPy arrays, torch tensors (of any device
                and dtype) or lists.
            train_logprobs: [N, T] nats, the training stack under the weights that made the batch.
            rollout_logprobs: [N, T] nats, as the engine reported them. NaN is written as null.
            mask: [N, T], not 0 on sampled tokens; None if all are. What lies outside of the first
                and the last of them is not written.
            entropies: [N, T] nats, the training stack's.
            advantages: [N], or [N, T] of which the mean over the sampled tokens is written.
            rewards: [N].
            groups: [N] texts or integers, which prompt each answers.
            sources: [N] names of the task or environment.
            lags: [N] integers, how many steps old the weights were that sampled it.
            top: the engine's top k ids at each token, most probable first and -1 for none, the
                training stack's log-probs of them and the engine's, [N, T, k] each. They take 11 k
                bytes a token at most, see `packed_top`; a recording has one k.

        Raises:
            ValueError: if `step` is negative or a shape differs from that of `token_ids`, naming
                the argument.
        """
        ids = _array(token_ids)
        if step < 0 or ids.ndim != 2:
            raise ValueError(
                f"step is {step} and token_ids is {list(ids.shape)}: allowed are a step from 0 "
                "and [N, T]"
            )
        sampled = np.ones(ids.shape, bool) if mask is None else _array(mask) != 0
        tokens = {
            "token_ids": ids,
            "train_logprobs": _array(train_logprobs),
            "rollout_logprobs": _array(rollout_logprobs),
            "mask": sampled,
        }
        if entropies is not None:
            tokens["entropies"] = _array(entropies)
        for name, values in tokens.items():
            if values.shape != ids.shape:
                raise ValueError(
                    f"{name} is {list(values.shape)}, token_ids is {list(ids.shape)}: must be the "
                    "same"
                )
        top_arrays = []
        if top is not None:
            top_arrays = [_array(values) for values in top]
            self._check_top(top_arrays, ids.shape)

        completions = {}
        for name, values in {
            "advantage": advantages,
            "reward": rewards,
            "group": groups,
            "source": sources,
            "lag": lags,
        }.items():
            if values is None:
                continue
            values = _array(values, name)
            if name == "advantage" and values.ndim == 2:
                totals = np.where(sampled, values, 0).sum(axis=1)
                values = totals / np.maximum(sampled.sum(axis=1), 1)
            if values.shape != ids.shape[:1]:
                raise ValueError(
                    f"{name} is {list(values.shape)}, must be [{len(ids)}], one for each completion"
                )
            completions[name] = values

        lines = []
        for row in np.flatnonzero(sampled.any(axis=1)):
            indices = np.flatnonzero(sampled[row])
            span = slice(indices[0], indices[-1] + 1)
            record = {
                "recorder": SCHEMA,
                "framework": self._framework,
                "step": int(step),
                "rank": self._rank,
            }
            for name, values in tokens.items():
                record[name] = _plain(values[row, span])
            if top_arrays:
                record["top"] = packed_top(*(values[row, span] for values in top_arrays))
            for name, values in completions.items():
                record[name] = _plain(values[row])
            lines.append(json.dumps(record) + "\n")
        path = self._directory / f"step_{step}" / f"rank_{self._rank}.jsonl"
        os.makedirs(path.parent, exist_ok=True)
        if not self._begun:
            self._warn_of_later_steps(step)
        mode = "a" if step in self._begun else "w"
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(lines)
        self._begun.add(step)

    def _warn_of_later_steps(self, step: int) -> None:
        """An earlier attempt's later steps are replaced as this one gets there; a run's are not."""
        names = [path.name.removeprefix("step_") for path in self._directory.glob("step_*")]
        last_step = max((int(name) for name in names if name.isdigit()), default=step)
        if last_step > step:
            warnings.warn(
                f"{self._directory} has steps up to {last_step}, this recording begins at {step}: "
                "if they are of another run, delete them, or give each run a directory of its own",
                stacklevel=3,
            )

    def _check_top(self, arrays: list[np.ndarray], shape: tuple[int, ...]) -> None:
        count = arrays[0].shape[-1]
        fault = ""
        if any(values.shape != (*shape, count) for values in arrays):
            fault = f"expected {[*shape, count]} for all"
        elif self._top not in (None, count):
            fault = f"this recording began with k={self._top}"
        if fault:
            raise ValueError(f"top is {[list(values.shape) for values in arrays]}: {fault}")
        self._top = count


def packed_top(
    ids: np.ndarray, train_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> dict[str, Any]:
    """Lists [T, k] as a JSON value: int32 ids and float16 differences, zlib, base 64.

    Of the engine's log-probs the differences from one entry to the next, of the training stack's
    those from the engine's: each loses 2^-11 of itself at most. 8 k bytes a token before
    compression.
    """
    is_listed = np.asarray(ids) >= 0
    rollout = np.where(is_listed, rollout_logprobs, 0).astype(np.float64)
    train = np.where(is_listed, train_logprobs, 0).astype(np.float64)
    arrays = {
        "ids": np.asarray(ids, np.int32),
        "rollout": np.diff(rollout, axis=-1, prepend=0.0).astype(np.float16),
        "train": (train - rollout).astype(np.float16),
    }
    packed = {"k": arrays["ids"].shape[-1]}
    for name, array in arrays.items():
        packed[name] = base64.b64encode(zlib.compress(array.tobytes())).decode()
    return packed


def unpacked_top(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`packed_top` read: ids int32, train_logprobs and rollout_logprobs float32, [T, k] each.

    Log-probs are 0 where the id is -1.
    """

    def array(name: str, dtype: type) -> np.ndarray:
        content = zlib.decompress(base64.b64decode(packed[name]))
        return np.frombuffer(content, dtype).reshape(-1, packed["k"])

    ids = array("ids", np.int32)
    rollout = np.cumsum(array("rollout", np.float16).astype(np.float64), axis=-1)
    train = rollout + array("train", np.float16)
    train_logprobs = np.where(ids >= 0, train, 0).astype(np.float32)
    rollout_logprobs = np.where(ids >= 0, rollout, 0).astype(np.float32)
    return ids, train_logprobs, rollout_logprobs


def record_trl(
    recorder: Recorder,
    step: int,
    output: Batch,
    old_logprobs: Any = None,
    **optional: Any,
) -> None:
    """Record a batch of TRL's `GRPOTrainer._generate_and_score_completions`, with vLLM as engine.

    TRL computes `old_per_token_logps` when `vllm_importance_sampling_correction` is on or
    generation and optimizer steps are not aligned; else give `old_logprobs`. A token for which vLLM
    has no log-prob (NaN) is left out. `optional` are `entropies` and `top` of `Recorder.write`,
    here and below, at the places of the completion tokens, and here `rewards`: no batch has them.
    Only entropies show that the tokens come from neither column, only rewards a collapse.

    Raises:
        ValueError: if the batch lacks one of the two log-probs, naming the setting that gives it.
    """
    rollout = output.get("sampling_per_token_logps")
    train = output.get("old_per_token_logps") if old_logprobs is None else old_logprobs
    # TRL computes the other log-probs on its own only with vLLM.
    if rollout is None:
        raise ValueError(
            "the batch has no sampling_per_token_logps: set use_vllm=True, or return logprobs from "
            "rollout_func"
        )
    if train is None:
        raise ValueError(
            "the batch has no old_per_token_logps: set vllm_importance_sampling_correction=True "
            "(with use_vllm); with rollout_func pass old_logprobs, or use DcGrpoTrainer(on_batch=)"
        )
    mask = _array(output["completion_mask"])
    if "tool_mask" in output:
        mask = mask * _array(output["tool_mask"])
    rollout = _array(rollout)
    mask = mask * ~np.isnan(rollout)
    recorder.write(
        step,
        output["completion_ids"],
        train,
        rollout,
        mask,
        advantages=output["advantages"],
        **optional,
    )


def record_verl(
    recorder: Recorder,
    step: int,
    batch: Batch,
    other: Batch | None = None,
    **optional: Any,
) -> None:
    """Record a batch of verl: `DataProto.batch` and `.non_tensor_batch`, once it has advantages.

    Needs actor_rollout_ref.rollout.calculate_log_probs=True. In bypass mode both log-probs are the
    engine's, and there is nothing to measure: a warning, once.

    Raises:
        ValueError: if the batch has no `rollout_log_probs`.
    """
    # A TensorDict iterates over its rows.
    if "rollout_log_probs" not in batch.keys():  # noqa: SIM118
        raise ValueError(
            "the batch has no rollout_log_probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if np.array_equal(_array(batch["old_log_probs"]), _array(batch["rollout_log_probs"])):
        warnings.warn(
            "old_log_probs equal rollout_log_probs bit for bit, a recording without a mismatch: "
            "set algorithm.rollout_correction.bypass_mode=False",
            stacklevel=1,
        )
    if "advantages" in batch.keys():  # noqa: SIM118
        optional["advantages"] = batch["advantages"]
    if "token_level_scores" in batch.keys():  # noqa: SIM118
        optional["rewards"] = _array(batch["token_level_scores"]).sum(axis=1)
    for name, key in (("groups", "uid"), ("sources", "data_source")):
        if other is not None and key in other:
            optional[name] = other[key]
    recorder.write(
        step,
        batch["responses"],
        batch["old_log_probs"],
        batch["rollout_log_probs"],
        batch["response_mask"],
        **optional,
    )


def record_skyrl(recorder: Recorder, step: int, batch: Batch, **optional: Any) -> None:
    """Record a `TrainingInputBatch` of SkyRL, after `compute_advantages_and_returns`.

    Every tensor is padded on the left; `sequences` holds the prompts too. Needs
    generator.sampling_params.logprobs=0 or more.

    Raises:
        ValueError: if the batch lacks one of the two log-probs.
    """
    for name in ("action_log_probs", "rollout_logprobs"):
        if batch[name] is None:
            raise ValueError(
                f"the batch has no {name}: have the engine return log-probs and the policy "
                "recompute them"
            )
    if batch.get("rewards") is not None:
        optional["rewards"] = _array(batch["rewards"]).sum(axis=1)
    width = _array(batch["loss_mask"]).shape[1]
    recorder.write(
        step,
        _array(batch["sequences"])[:, -width:],
        batch["action_log_probs"],
        batch["rollout_logprobs"],
        batch["loss_mask"],
        advantages=batch["advantages"],
        **optional,
    )


def _array(values: Any, name: str = "") -> np.ndarray:
    """A NumPy array of a torch tensor, an array or a list; groups and sources stay as they are."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.is_floating_point():
            values = values.float()  # NumPy has no bfloat16
        values = values.numpy()
    if name in ("group", "source"):
        return np.array(list(values), object)
    return np.asarray(values)


def _plain(values: Any) -> Any:
    """JSON types; NaN is null. float32 is written with as many digits as give it back."""
    if not isinstance(values, np.ndarray | np.generic):
        if isinstance(values, str | int):
            return values
        return str(values)
    if values.dtype.kind == "b":
        return values.astype(int).tolist()
    if values.dtype.kind != "f":
        return values.tolist()
    plain = [None if x != x else float(str(x)) for x in np.atleast_1d(values)]
    if not values.ndim:
        return plain[0]
    return plain

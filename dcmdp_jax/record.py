"""Record what another trainer saw, for `dcmdp probe`. Needs NumPy alone: no jax, no torch, nothing
else from here.

    recorder = Recorder("recordings", "trl", rank=rank)
    recorder.write(step, token_ids, train_logprobs, rollout_logprobs, mask, advantages=advantages)

writes recordings/step_N/rank_R.jsonl, one completion a line; `dcmdp probe recordings` reads it.
`record_trl`, `record_verl` and `record_skyrl` take what these frameworks have at hand
(docs/probe.md has the place to call them). The file may also be copied into another project.
"""

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = 1


class Recorder:
    """Writes the tokens of a run, each step into a file of its own for each rank.

    The first call for a step replaces what an earlier attempt of the run left in its file; further
    ones append.

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
            top: the engine's k likeliest ids at each token, likeliest first and -1 for none, the
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
        tokens = {"token_ids": ids, "train_logprobs": _array(train_logprobs)}
        tokens |= {"rollout_logprobs": _array(rollout_logprobs)}
        tokens |= {"mask": np.ones(ids.shape, bool) if mask is None else _array(mask) != 0}
        tokens |= {} if entropies is None else {"entropies": _array(entropies)}
        for name, values in tokens.items():
            if values.shape != ids.shape:
                raise ValueError(
                    f"{name} is {list(values.shape)}, token_ids is {list(ids.shape)}: must be the "
                    "same"
                )
        lists = None if top is None else [_array(values) for values in top]
        if lists is not None:
            self._check_top(lists, ids.shape)
        sampled = tokens["mask"]
        whole = {
            "advantage": advantages,
            "reward": rewards,
            "group": groups,
            "source": sources,
            "lag": lags,
        }
        whole = {name: _array(values, name) for name, values in whole.items() if values is not None}
        if "advantage" in whole and whole["advantage"].ndim == 2:
            totals = np.where(sampled, whole["advantage"], 0).sum(axis=1)
            whole["advantage"] = totals / np.maximum(sampled.sum(axis=1), 1)
        for name, values in whole.items():
            if values.shape != ids.shape[:1]:
                raise ValueError(
                    f"{name} is {list(values.shape)}, must be [{len(ids)}], one for each completion"
                )
        rows = []
        for row in np.flatnonzero(sampled.any(axis=1)):
            places = np.flatnonzero(sampled[row])
            span = slice(places[0], places[-1] + 1)
            record = {
                "recorder": SCHEMA,
                "framework": self._framework,
                "step": int(step),
                "rank": self._rank,
            }
            record |= {name: _plain(values[row, span]) for name, values in tokens.items()}
            record |= (
                {}
                if lists is None
                else {"top": packed_top(*(values[row, span] for values in lists))}
            )
            rows.append(
                json.dumps(record | {name: _plain(values[row]) for name, values in whole.items()})
                + "\n"
            )
        path = self._directory / f"step_{step}" / f"rank_{self._rank}.jsonl"
        os.makedirs(path.parent, exist_ok=True)
        with path.open("a" if step in self._begun else "w", encoding="utf-8") as file:
            file.writelines(rows)
        self._begun.add(step)

    def _check_top(self, lists: list[np.ndarray], shape: tuple[int, ...]) -> None:
        count = lists[0].shape[-1]
        wrong = [values.shape for values in lists if values.shape != (*shape, count)]
        if wrong or count != (self._top or count):
            said = (
                f"this recording began with k={self._top}"
                if not wrong
                else f"expected {[*shape, count]} for all"
            )
            raise ValueError(f"top is {[list(values.shape) for values in lists]}: {said}")
        self._top = count


def packed_top(
    ids: np.ndarray, train_logprobs: np.ndarray, rollout_logprobs: np.ndarray
) -> dict[str, Any]:
    """Lists [T, k] as a JSON value: int32 ids and float16 differences, compressed by zlib, in base
    64.

    Of the engine's log-probs the differences from one entry to the next, of the training stack's
    those from the engine's: each loses 2^-11 of itself at most. 8 k bytes a token before
    compression.
    """
    there = np.asarray(ids) >= 0
    rollout, train = (
        np.where(there, x, 0).astype(np.float64) for x in (rollout_logprobs, train_logprobs)
    )
    steps = np.diff(rollout, axis=-1, prepend=0.0)
    parts = {"ids": np.asarray(ids, np.int32), "rollout": steps.astype(np.float16)}
    parts["train"] = (train - rollout).astype(np.float16)
    packed = {
        name: base64.b64encode(zlib.compress(part.tobytes())).decode()
        for name, part in parts.items()
    }
    return {"k": int(parts["ids"].shape[-1]), **packed}


def unpacked_top(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`packed_top` read: ids int32, train_logprobs and rollout_logprobs float32, [T, k] each; 0
    where the id is -1.
    """
    kinds = {"ids": np.int32, "rollout": np.float16, "train": np.float16}
    found = {
        name: np.frombuffer(zlib.decompress(base64.b64decode(packed[name])), kind).reshape(
            -1, packed["k"]
        )
        for name, kind in kinds.items()
    }
    there = found["ids"] >= 0
    rollout = np.cumsum(found["rollout"].astype(np.float64), axis=-1)
    logprobs = (
        np.where(there, x, 0).astype(np.float32) for x in (rollout + found["train"], rollout)
    )
    return found["ids"], *logprobs


def record_trl(
    recorder: Recorder,
    step: int,
    output: Mapping[str, Any],
    old_logprobs: Any = None,
    **optional: Any,
) -> None:
    """Record a batch of TRL from `GRPOTrainer._generate_and_score_completions`, with vLLM as its
    engine.

    TRL computes `old_per_token_logps` when `vllm_importance_sampling_correction` is on or
    generation and optimizer steps are not aligned; else give `old_logprobs`. A token for which vLLM
    has no log-prob (NaN) is left out. `optional` are `entropies` and `top` of `Recorder.write`,
    here and below, at the places of the completion tokens: no batch has them. Only entropies show
    that the tokens come from neither column.

    Raises:
        ValueError: if the batch lacks one of the two log-probs, naming the setting that gives it.
    """
    old = output.get("old_per_token_logps") if old_logprobs is None else old_logprobs
    for name, values, setting in (
        # TRL computes the other log-probs on its own only with vLLM.
        ("sampling_per_token_logps", output.get("sampling_per_token_logps"), "use_vllm=True"),
        ("old_per_token_logps", old, "vllm_importance_sampling_correction=True"),
    ):
        if values is None:
            raise ValueError(f"the batch has no {name}: set {setting}")
    mask = _array(output["completion_mask"])
    if "tool_mask" in output:
        mask = mask * _array(output["tool_mask"])
    rollout = _array(output["sampling_per_token_logps"])
    mask = mask * ~np.isnan(rollout)
    recorder.write(
        step,
        output["completion_ids"],
        old,
        rollout,
        mask,
        advantages=output["advantages"],
        **optional,
    )


def record_verl(
    recorder: Recorder,
    step: int,
    batch: Mapping[str, Any],
    other: Mapping[str, Any] | None = None,
    **optional: Any,
) -> None:
    """Record a batch of verl: `DataProto.batch` and `.non_tensor_batch`, after the advantages are
    computed.

    Needs actor_rollout_ref.rollout.calculate_log_probs=True. In bypass mode both log-probs are the
    engine's, and there is nothing to measure.

    Raises:
        ValueError: if the batch has no `rollout_log_probs`.
    """
    if "rollout_log_probs" not in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        raise ValueError(
            "the batch has no rollout_log_probs: set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    if "advantages" in batch.keys():  # noqa: SIM118
        optional["advantages"] = batch["advantages"]
    if "token_level_scores" in batch.keys():  # noqa: SIM118
        optional["rewards"] = _array(batch["token_level_scores"]).sum(axis=1)
    for name, key in (("groups", "uid"), ("sources", "data_source")):
        if other is not None and key in other:
            optional[name] = other[key]
    names = "responses", "old_log_probs", "rollout_log_probs", "response_mask"
    recorder.write(step, *(batch[name] for name in names), **optional)


def record_skyrl(recorder: Recorder, step: int, batch: Mapping[str, Any], **optional: Any) -> None:
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
    width = _array(batch["loss_mask"]).shape[1]
    sequences = _array(batch["sequences"])[:, -width:]
    columns = [batch[name] for name in ("action_log_probs", "rollout_logprobs", "loss_mask")]
    recorder.write(step, sequences, *columns, advantages=batch["advantages"], **optional)


def _array(values: Any, name: str = "") -> np.ndarray:
    """A NumPy array of a torch tensor, an array or a list; texts and integers of a group stay what
    they are.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.array(list(values), object) if name in ("group", "source") else np.asarray(values)


def _plain(values: Any) -> Any:
    """JSON types; NaN is null. float32 is written with as many digits as give it back."""
    if not isinstance(values, np.ndarray | np.generic):
        return values if isinstance(values, str | int) else str(values)
    if values.dtype.kind == "b":
        return values.astype(int).tolist()
    if values.dtype.kind != "f":
        return values.tolist()
    short = [None if x != x else float(str(x)) for x in np.atleast_1d(values)]
    return short if values.ndim else short[0]

"""Metrics of a step's completions, computed on the host."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import Episode, identical_metrics
from dcmdp_jax.data.lengths import QUANTILES
from dcmdp_jax.observe.legs import legs_of
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.rewards.scoring import reward_metrics
from dcmdp_jax.training.rollout_sampler import StepRollout


def rollout_metrics(rollout: StepRollout, discrepancy: np.ndarray, *, refills: bool) -> dict[str, float]:
    """Rewards, lengths, truncations, what the verifier could not read, and what differs between data sources.

    Args:
        rollout: the step's completions and rewards.
        discrepancy: [B * G] mean of each completion of the batch.
        refills: add the cost of dynamic sampling, and rewards over all that was sampled: over the batch they would be
            selected.
    """
    metrics = length_metrics(rollout.episodes, rollout.scores.grades) | reward_metrics(rollout.scores)
    metrics |= identical_metrics(rollout.episodes)
    usable = ~rollout.dropped
    if rollout.scores.sources is not None:
        sources = np.array(rollout.scores.sources)[rollout.rows]
        lengths = np.array([rollout.episodes[row].num_sampled for row in rollout.rows])
        for source in sorted(set(sources[usable[rollout.rows]].tolist())):
            mine = usable[rollout.rows] & (sources == source)
            metrics[f"discrepancy/source/{source}/mean"] = float(discrepancy[mine].mean(dtype=np.float64))
            metrics[f"completion/source/{source}/length_mean"] = float(lengths[mine].mean())
    if refills:
        rewards, differing = rollout.scores.totals.astype(np.float64)[usable], rollout.differing
        differs = differing[usable.reshape(len(differing), -1).any(axis=1)]
        metrics |= {
            "reward/mean": float(rewards.mean()) if rewards.size else 0.0,
            "reward/std": float(rewards.std()) if rewards.size else 0.0,
            "reward/all_equal_groups": float((~differs).mean()) if differs.size else 0.0,
            "rollout/sampled_prompts": len(differing),
            "rollout/refill_rounds": rollout.rounds - 1,
            "rollout/unfilled_groups": int((~differing[rollout.groups]).sum()),
        }
    return metrics


def length_metrics(episodes: Sequence[Episode], grades: Grades | None) -> dict[str, float]:
    """Lengths, truncations, and what the verifier could not read if it was asked, by the names of metric_names.py."""
    lengths = [episode.num_sampled for episode in episodes]
    p10, p25, p50, p75, p90 = np.percentile(lengths, QUANTILES).tolist()
    judged = {} if grades is None else {
        "reward/verifier_timeouts": grades.timeouts,
        "reward/verifier_errors": grades.errors,
        "reward/verifier_over_budget": grades.over_budget,
        "reward/no_answer_fraction": grades.unparsed / max(1, grades.rewards.size),
    }  # fmt: skip
    return judged | {
        "completion/length_mean": float(np.mean(lengths)),
        "completion/length_min": min(lengths),
        "completion/length_p10": p10,
        "completion/length_p25": p25,
        "completion/length_p50": p50,
        "completion/length_p75": p75,
        "completion/length_p90": p90,
        "completion/length_max": max(lengths),
        "completion/truncated_fraction": float(np.mean([episode.finish_reason == "length" for episode in episodes])),
    }


def leg_metrics(
    completions: Sequence[Mapping[str, Any]], rows: np.ndarray, scored: Mapping[int, np.ndarray]
) -> dict[str, float]:
    """The legs of the gap of the completions that the engine scored in one pass, see `observe.legs`; none without.

    Args:
        completions: those of `recorded_completions`.
        rows: number of each completion of the batch among all that were sampled.
        scored: number of a completion -> the log-probs of its tokens, [T] float32 nats.
    """
    found = [
        np.stack([each["rollout_logprobs"], scored[row], each["train_logprobs"]])[:, each["mask"]]
        for each in completions
        if (row := int(rows[each["completion"]])) in scored
    ]
    if not found:
        return {}
    decoding, one_pass = legs_of(*np.concatenate(found, axis=1))
    means = {"mismatch/leg_decoding": decoding.mean, "mismatch/leg_one_pass": one_pass.mean}
    return means | {"mismatch/leg_decoding_share": decoding.share}

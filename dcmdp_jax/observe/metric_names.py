"""Every metric a run records: name, unit, meaning, and the function that makes it.

The one table, which the report reads and docs/metrics.md is written from. `grep '"NAME"'` finds a
metric in the file of its function; a test holds that.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable

from dcmdp_jax.number_format import number, percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One recorded quantity.

    Attributes:
        name: key in `metrics.jsonl`; a part in braces stands for a name of the user's.
        unit: unit of the value.
        description: one line.
        made_by: file below `dcmdp_jax` and the function in it that makes it, `FILE:FUNCTION`.
    """

    name: str
    unit: str = ""
    description: str = ""
    made_by: str = ""


_TABLE = """
@training/step_metrics.py:batch_metrics
reward/mean | reward | mean over the step's completions of the weighted sum of all rewards
reward/std | reward | standard deviation of the reward over the step's completions
reward/all_equal_groups | fraction | zero-variance groups: prompts whose completions all received
    the same reward (zero advantage)
@rewards/scoring.py:reward_metrics
reward/without_value | completions | completions without a value of any reward; reward 0
reward/source/{source}/mean | reward | mean reward of data source {source}
reward/source/{source}/std | reward | standard deviation of the reward of data source {source}
reward/{reward}/mean | reward | mean of the reward {reward}, before its weight, over the completions
    it gave a value
reward/{reward}/std | reward | standard deviation of the reward {reward}, before its weight
reward/{reward}/failed | completions | completions that the reward {reward} failed on
    (rewards.on_error)
logged/{name} | as logged | {name}: what reward functions logged under this name (log_metric), mean
    of the step
@training/rollout_record.py:length_metrics
reward/verifier_timeouts | completions | answers over the verifier's time limit; reward 0
reward/verifier_errors | completions | answers the verifier raised on; reward 0
reward/verifier_over_budget | completions | answers undecided when the verifier's budget for the
    batch ran out; reward 0
reward/no_answer_fraction | fraction | completions without an answer, which get reward 0
completion/length_mean | tokens | mean sampled tokens of a completion, end-of-sequence included
completion/length_min | tokens | shortest completion
completion/length_p10 | tokens | 10th percentile of the lengths
completion/length_p25 | tokens | 25th percentile of the lengths
completion/length_p50 | tokens | 50th percentile of the lengths
completion/length_p75 | tokens | 75th percentile of the lengths
completion/length_p90 | tokens | 90th percentile of the lengths
completion/length_max | tokens | longest completion
completion/truncated_fraction | fraction | completions cut by the length limit
@rewards/scoring.py:BatchScoring
completion/beyond_vocabulary_fraction | fraction | sampled tokens beyond the tokenizer's vocabulary;
    they have no text
environment/turns_mean | 1 | turns of the policy in a completion, mean
environment/done_fraction | fraction | completions that the environment ended, not a limit
@data/episode.py:identical_metrics
completion/identical_fraction | fraction | completions that equal another one of their prompt token
    by token
completion/identical_chance | fraction | the same as expected of independent samples of the engine's
    probabilities
@training/rollout_record.py:rollout_metrics
discrepancy/source/{source}/mean | discrepancy | mean over the completions of data source {source},
    each counted once
completion/source/{source}/length_mean | tokens | mean length of the completions of data source
    {source}
rollout/sampled_prompts | prompts | prompts sampled by dynamic sampling, replaced groups included
rollout/refill_rounds | calls | further calls of the engine by dynamic sampling
rollout/unfilled_groups | prompts | zero-variance groups that dynamic sampling found no other
    for
@data/packing.py:staleness_metrics
rollout/staleness_mean | steps | mean age of the sampled tokens: the trained policy's step minus
    theirs
rollout/staleness_max | steps | age of the oldest sampled token
@training/batches.py:Batches
rollout/dropped_completions | completions | left out because a log-prob was not finite
rollout/padding_fraction | fraction | padding among the tokens that the training step computed
@training/step.py:_statistics
discrepancy/mean | discrepancy | token-weighted batch mean: what the dual step compares with the
    tolerance
dual/penalty_share | fraction | penalty in the update: C / (C + S), C = sum |penalty| (1 - p), S =
    sum |advantage| (1 - p)
policy/entropy | nats | mean entropy of the policy over sampled tokens
@training/objective.py:distillation
policy/teacher_kl | nats | mean of log p^Train - log p of the teacher: about KL(policy || teacher)
@config/algorithm.py:AlgorithmSettings.bounded_metric
discrepancy/spent | discrepancy | quantile that algorithm.budget names, compared with the tolerance;
    absent for "mean"
@training/step_metrics.py:batch_metrics
discrepancy/p50 | discrepancy | median over sampled tokens
discrepancy/p99 | discrepancy | 99th percentile over sampled tokens
discrepancy/max | discrepancy | largest over sampled tokens
discrepancy/engine_share | fraction | part of the discrepancy in tokens that the engine finds
    likelier than the trainer
discrepancy/completions_over_tolerance | fraction | completions whose own mean exceeds the tolerance
@algorithm/discrepancy.py:displacement_statistics
displacement/mean | nats | mean of logit p_train - logit p_engine of the sampled token
displacement/abs_mean | nats | mean of its absolute value, which confidence does not shrink as it
    does |p - q|
displacement/abs_p50 | nats | 50th percentile of its absolute value
displacement/abs_p95 | nats | 95th percentile of its absolute value
displacement/abs_p99 | nats | 99th percentile of its absolute value
@algorithm/discrepancy.py:mismatch_statistics
mismatch/k1 | nats | mean of rollout - train log-probs: KL(rollout || train), unbiased, may be
    negative
mismatch/k3 | nats | the same KL by the non-negative low-variance estimator
mismatch/pearson | correlation | Pearson correlation of train and rollout token probabilities
mismatch/effective_sample_size | fraction | effective share of tokens under train / rollout weights;
    1 is best
@training/giving_up.py:AlarmWatch.record
discrepancy/broken_completions | fraction | completions whose own mean is above 0.1 and 10 times the
    median completion's
@algorithm/distribution.py:distribution_statistics
distribution/total_variation | probability | with rollout.top_logprobs: mean over positions, the
    remaining mass as one token
distribution/total_variation_bound | probability | how much larger it can be: mean of the smaller
    tail
distribution/kl_engine | nats | mean over states of KL(engine || train), the tail as one token
distribution/kl_engine_bound | nats | how much larger it can be where no tail token's log-ratio is
    above 20
distribution/kl_trainer | nats | mean over states of KL(train || engine), the tail as one token
distribution/kl_trainer_bound | nats | how much larger it can be where no tail token's log-ratio is
    above 20
distribution/expected_discrepancy | discrepancy | mean over states of the expected delta;
    discrepancy/mean estimates it
distribution/expected_discrepancy_bound | discrepancy | how much larger it can be by the tail
distribution/head_mass | probability | mean mass of the top-k tokens, by the engine
@training/step_metrics.py:statistics_metrics
distribution/sampling_noise | discrepancy | standard deviation of discrepancy/mean about that
    expectation, by sampling
@training/objective.py:head_statistics
distribution/kept_mass | probability | with top_p or top_k: mean S, the trainer's mass of the tokens
    kept by the engine
@training/batches.py:Batches
mismatch/noise_floor | discrepancy | of the engine against itself in another batch shape, at steps
    1, 17, 65, 257, ...
mismatch/sampler | discrepancy | precision exact: of the sampler's own log-probs, which were
    replaced
@training/rollout_record.py:leg_metrics
mismatch/leg_decoding | probability | decode vs. prefill: mean |q - s|, s the engine's prefill; at
    recorded noise-floor steps
mismatch/leg_one_pass | probability | prefill vs. trainer: mean |s - p| of the same tokens; q - p
    is the sum of both
mismatch/leg_decoding_share | fraction | sum (q - s)(q - p) / sum (q - p)^2; the rest is prefill
    vs. trainer
@engines/vllm/engine.py:VllmEngine.sync_weights
mismatch/probe | nats | mean |log p_train - log p_engine| on fixed sequences, right after the
    weight sync
replica/{replica}/{measure} | tokens, seconds or restarts | with Ray: of replica {replica} since the
    last weight sync
@models/lora.py:merged_and_measured
mismatch/merge_rounding | fraction | with adapters, merged or not: as sync_rounding, of what a merge
    changes
@models/quantize.py:arrival
mismatch/sync_changed | fraction | weights of the engine's matrices that the step's update changes;
    not with adapters
mismatch/sync_rounding | 1 | norm of what rounding adds to or takes from the update, over the
    update's; 1: none arrives
@training/step_metrics.py:gap_metrics
staleness/log_ratio_mean | nats | with rollout.lag: mean of log p_train now - log p_train of the
    weights that sampled
staleness/log_ratio_abs_mean | nats | mean of its absolute value
staleness/log_ratio_max | nats | its largest absolute value
mismatch/log_ratio_mean | nats | with rollout.lag: mean of log p_train of the weights that sampled -
    log p_engine
mismatch/log_ratio_abs_mean | nats | mean of its absolute value
mismatch/log_ratio_max | nats | its largest absolute value
gap/log_ratio_mean | nats | with rollout.lag: mean of log p_train now - log p_engine, the sum of
    staleness and mismatch
gap/log_ratio_abs_mean | nats | mean of its absolute value
gap/log_ratio_max | nats | its largest absolute value
@training/step_metrics.py:step_metrics
dual/multiplier | advantage / discrepancy | lambda, the weight of the penalty, as this step used it
dual/tolerance | discrepancy | c, the tolerance for the mean discrepancy, or for the quantile of
    algorithm.budget
optimizer/learning_rate | 1 | learning rate of the step's last update
optimizer/skipped_in_row | updates | skipped updates since the last that was made
optimizer/loss_scale | 1 | factor of the loss against underflow of float16 gradients
@training/step.py:train_step
dual/violation | discrepancy | mean discrepancy, or the quantile of algorithm.budget, minus c;
    above 0 lambda rises
@training/step_metrics.py:statistics_metrics
correction/weight_mean | 1 | mean weight by corrections over all tokens, 0 where dropped
correction/effective_sample_size | fraction | effective share of tokens under those weights; 1 is
    best
@algorithm/corrections.py:statistics
correction/dropped_fraction | fraction | tokens that corrections leave out of the loss
correction/truncated_fraction | fraction | kept tokens whose weight a bound of a correction changed
@algorithm/losses.py:surrogate
policy/clip_low_fraction | fraction | tokens whose gradient the lower clip of the ratio stops
policy/clip_high_fraction | fraction | tokens whose gradient the upper clip of the ratio stops
@algorithm/trust_regions.py:clip
policy/dual_clip_fraction | fraction | tokens whose gradient the dual clip stops
@algorithm/losses.py:policy_loss
policy/ratio_mean | ratio | mean importance ratio, train now over train at sampling
policy/ratio_max | ratio | largest importance ratio
policy/ratio_min | ratio | smallest importance ratio
@training/step.py:_update
policy/loss | advantage | the minimized loss, mean of the updates that were made
optimizer/grad_norm | norm | global gradient norm before clipping
optimizer/skipped_updates | updates | updates skipped: gradient, loss or advantage not finite
@training/sft.py:_evaluate
eval/{task}/loss | nats | dcmdp sft: mean negative log-likelihood of the targets of validation
    {task}
@training/objective.py:SURROGATE
policy/surrogate | advantage | its first term, recorded where the loss has others too
policy/kl | nats | its divergence from the initial policy, before algorithm.kl_coefficient
policy/router_loss | 1 | its load-balancing loss, before algorithm.router_aux_loss
@models/moe.py:router_metrics
moe/load_max_over_mean | ratio | tokens of the busiest expert over the mean, in the layer where it
    is largest
moe/load_entropy | fraction | entropy of the experts' load over its largest, mean of layers; 1 is
    even
moe/router_entropy | nats | mean entropy of the router's distribution for a token
moe/balance_loss | 1 | load-balancing loss before its weight; the experts of a token if all is even
moe/routing_agreement | fraction | replayed experts that the trainer's router would have chosen for
    the token
@training/giving_up.py:SkippedUpdates.record
optimizer/skipped_share | fraction | share of the updates of the last 20 steps that was skipped
@training/phase_timer.py:PHASES
time/weight_sync | seconds | weight sync of the inference engine
time/generate | seconds | sampling the completions
time/verify | seconds | verifying the answers
time/noise_floor | seconds | the engine against itself, at the steps that measure it
time/pack | seconds | packing tokens into rows
time/step | seconds | the compiled training step
time/wait | seconds | with rollout.lag: the trainer waits for the sampler
@training/batches.py:Batches
time/engine_idle | seconds | with rollout.lag: the sampler waits for the trainer, weight syncs
    included
@training/phase_timer.py:PhaseTimer.metrics
time/overlap | seconds | with rollout.lag: seconds that overlap saves, the sum of a step's parts
    less its time
time/total | seconds | the whole step, from prompts to record
throughput/tokens_per_second | tokens / s | prompt and completion tokens over the whole step's time
throughput/sampled_tokens_per_second | tokens / s | sampled tokens over the time spent generating
@observe/metrics_io.py:CLOCK
time/clock | seconds | Unix time at which the line was written
@observe/alarms.py:ALARMS
alarm/{alarm} | 0 or 1 | 1 while the alert {alarm} is raised; observe/alarms.py has its rule
@evaluation/held_out.py:held_out_metrics
eval/{task}/avg@{samples} | reward | validation {task}: mean reward over {samples} samples a problem
eval/{task}/pass@{samples} | fraction | validation {task}: problems solved by at least one of
    {samples} samples
eval_interval/{task}/{bound} | reward | validation {task}, {bound} bound of avg@K's 95% interval:
    bootstrap over problems
eval_reward/{task}/{reward} | reward | validation {task}/{reward}: mean of this one of several
    rewards, before its weight
eval_logged/{task}/{name} | as logged | {task}/{name}: what reward functions logged on a validation
    task (log_metric)
"""
"""Under `@FILE:FUNCTION` its metrics, in the order to show them. Indented lines go on."""


_RENAMED = {
    "dual/charge_share": "dual/penalty_share",
    "mismatch/push_changed": "mismatch/sync_changed",
    "mismatch/push_rounding": "mismatch/sync_rounding",
    "time/push": "time/weight_sync",
}
"""Name that an older run recorded -> name now."""


def current_name(name: str) -> str:
    """Today's name of a metric that an older run may have recorded under another."""
    return _RENAMED.get(name, name)


def _metrics() -> dict[str, Metric]:
    metrics = {}
    function = ""
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        if line.startswith("@"):
            function = line[1:]
        else:
            name, unit, description = line.split(" | ", 2)
            metrics[name] = Metric(name=name, unit=unit, description=description, made_by=function)
    return metrics


METRICS = _metrics()
"""Name to `Metric`, in the order to show them."""
_PATTERNS = {
    re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(name))): metric
    for name, metric in METRICS.items()
    if "{" in name
}


def form_of_score(
    name: str, values: Iterable[float], recorded: Iterable[str]
) -> Callable[[float], str]:
    """Return how to write a held-out score: `percent` for a share, else `number`.

    A sum of rewards is no share, nor are values outside 0 .. 1.

    Args:
        name: of the metric, `eval/<task>/avg@K`, `eval/<task>/pass@K`, or `eval/<task>/loss`, which
            is no share.
        values: all its values.
        recorded: names of the run's metrics; a run whose reward is a sum has `eval_reward/`.
    """
    if name.endswith("/loss") or any(value < 0 or value > 1 for value in values):
        return number
    if "/avg@" in name and any(other.startswith("eval_reward/") for other in recorded):
        return number
    return percent


STEP_PHASES = ("weight_sync", "generate", "verify", "noise_floor", "pack", "step")
"""The parts of `time/total`, in the order a step runs them."""


def metric_of(name: str) -> Metric:
    """The table's row for a recorded name, with the names of task, reward or data source in it.

    Args:
        name: a metric name. One that is in no table gets an empty unit and description, so that a
            reader of a newer or older run shows it all the same.
    """
    if name in METRICS:
        return METRICS[name]
    for pattern, metric in _PATTERNS.items():
        match = pattern.fullmatch(name)
        if match:
            description = metric.description.format(**match.groupdict())
            return dataclasses.replace(metric, name=name, description=description)
    return Metric(name=name)

"""Every metric a run records: name, unit, meaning. The one table the report and the documentation read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from dcmdp_jax.number_format import number, percent
from dcmdp_jax.observe.alarms import ALARMS


class Metric(NamedTuple):
    """One recorded quantity.

    Attributes:
        name: key in `metrics.jsonl`.
        unit: unit of the value.
        description: one line.
    """

    name: str
    unit: str
    description: str


_TABLE = """
reward/mean | reward | mean over the step's completions of the weighted sum of all rewards
reward/std | reward | standard deviation of the reward over the step's completions
reward/all_equal_groups | fraction | prompts whose completions all got one reward: no advantage to learn
reward/without_value | completions | completions that no reward has a value for; they get reward 0
reward/verifier_timeouts | completions | answers over the verifier's time limit; they get reward 0
reward/verifier_errors | completions | answers the verifier raised on; they get reward 0
reward/verifier_over_budget | completions | answers undecided when the verifier's budget for the batch ran out; they get
    reward 0
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
completion/beyond_vocabulary_fraction | fraction | sampled tokens whose id is beyond the tokenizer's: the model has more
    rows than it, and they have no text
completion/identical_fraction | fraction | completions that equal another one of their prompt token by token
completion/identical_chance | fraction | the same as expected of independent samples of the engine's probabilities
discrepancy/mean | discrepancy | token-weighted batch mean: what the dual step compares with the tolerance
discrepancy/spent | discrepancy | the quantile over sampled tokens that algorithm.budget names: what the dual step
    compares with the tolerance; not recorded where that is the mean
discrepancy/p50 | discrepancy | median over sampled tokens
discrepancy/p99 | discrepancy | 99th percentile over sampled tokens
discrepancy/max | discrepancy | largest over sampled tokens
discrepancy/engine_share | fraction | part of the discrepancy in tokens that the engine finds likelier than the trainer
discrepancy/completions_over_tolerance | fraction | completions whose own mean exceeds the tolerance
discrepancy/broken_completions | fraction | completions whose own mean is above 0.1 and 10 times the median completion's
displacement/mean | nats | logit p_train - logit p_engine of the sampled token: mean
displacement/abs_mean | nats | logit p_train - logit p_engine of the sampled token: mean absolute value, which
    confidence does not shrink as it does |p - q|
displacement/abs_p50 | nats | logit p_train - logit p_engine of the sampled token: 50th percentile of the absolute value
displacement/abs_p95 | nats | logit p_train - logit p_engine of the sampled token: 95th percentile of the absolute value
displacement/abs_p99 | nats | logit p_train - logit p_engine of the sampled token: 99th percentile of the absolute value
distribution/total_variation | probability | mean over states of the total variation of the two distributions, the tail
    as one token; recorded, as all of these, with rollout.top_logprobs
distribution/total_variation_bound | probability | how much larger it can be: mean of the smaller tail
distribution/kl_engine | nats | mean over states of KL(engine || train), the tail as one token
distribution/kl_engine_bound | nats | how much larger it can be where no tail token's log-ratio is above 20
distribution/kl_trainer | nats | mean over states of KL(train || engine), the tail as one token
distribution/kl_trainer_bound | nats | how much larger it can be where no tail token's log-ratio is above 20
distribution/expected_discrepancy | discrepancy | mean over states of the engine's expectation of delta, which
    discrepancy/mean estimates from the sampled tokens
distribution/expected_discrepancy_bound | discrepancy | how much larger it can be by the tail
distribution/sampling_noise | discrepancy | standard deviation of discrepancy/mean about that expectation, by sampling
distribution/kept_mass | probability | with rollout.top_p or top_k: mean of S, the trainer's mass of the tokens that the
    engine kept, before its distribution was cut to them
distribution/head_mass | probability | mean mass of the k likeliest tokens, by the engine
mismatch/k1 | nats | mean of rollout - train log-probs: KL(rollout || train), unbiased, may be negative
mismatch/k3 | nats | the same KL by the non-negative low-variance estimator
mismatch/pearson | correlation | Pearson correlation of train and rollout token probabilities
mismatch/effective_sample_size | fraction | effective share of tokens under train / rollout weights; 1 is best
mismatch/noise_floor | discrepancy | mean discrepancy, or the quantile of algorithm.budget, of the engine against
    itself in another batch shape, at steps 1, 17, 65, 257, ...
mismatch/leg_decoding | probability | mean |q - s|, s the engine's own probability in one pass, of the first 32
    completions; at the steps of the noise floor whose tokens are recorded, step 1 by default
mismatch/leg_one_pass | probability | mean |s - p| of the same tokens; q - p is the sum of both legs
mismatch/leg_decoding_share | fraction | sum (q - s)(q - p) / sum (q - p)^2; the other leg has the rest
mismatch/probe | nats | mean |log p_train - log p_engine| on fixed sequences, right after the push
mismatch/merge_rounding | fraction | with adapters: what the engine's rounding of the merged matrices adds to or takes
    from their change, as a norm over that of the change; 0: none, 1: the engine samples from the base
mismatch/push_changed | fraction | engine weights that the step's update changes, in rollout.precision, of its matrices;
    not with adapters, as the next
mismatch/push_rounding | 1 | norm of what the engine's rounding adds to or takes from the step's update, over
    that of the update; 0: none, 1: none of the update arrives, above 1: the rounding is larger than the update
mismatch/sampler | discrepancy | precision exact: of the sampler's own log-probs, which were replaced
staleness/log_ratio_mean | nats | log p_train now - log p_train under the weights that sampled, mean over sampled
    tokens; recorded with rollout.lag
staleness/log_ratio_abs_mean | nats | log p_train now - log p_train under the weights that sampled, mean absolute value
    over sampled tokens; recorded with rollout.lag
staleness/log_ratio_max | nats | log p_train now - log p_train under the weights that sampled, largest absolute value
    over sampled tokens; recorded with rollout.lag
mismatch/log_ratio_mean | nats | log p_train under the weights that sampled - log p_engine, mean over sampled tokens;
    recorded with rollout.lag
mismatch/log_ratio_abs_mean | nats | log p_train under the weights that sampled - log p_engine, mean absolute value over
    sampled tokens; recorded with rollout.lag
mismatch/log_ratio_max | nats | log p_train under the weights that sampled - log p_engine, largest absolute value over
    sampled tokens; recorded with rollout.lag
gap/log_ratio_mean | nats | log p_train now - log p_engine, the sum of staleness and mismatch, mean over sampled tokens;
    recorded with rollout.lag
gap/log_ratio_abs_mean | nats | log p_train now - log p_engine, the sum of staleness and mismatch, mean absolute value
    over sampled tokens; recorded with rollout.lag
gap/log_ratio_max | nats | log p_train now - log p_engine, the sum of staleness and mismatch, largest absolute value
    over sampled tokens; recorded with rollout.lag
rollout/dropped_completions | completions | left out because a log-prob was not finite
rollout/sampled_prompts | prompts | prompts sampled by dynamic sampling, those of replaced groups included
rollout/refill_rounds | calls | further calls of the engine by dynamic sampling
rollout/unfilled_groups | prompts | groups of all-equal rewards that dynamic sampling found no other for
rollout/staleness_mean | steps | mean age of the sampled tokens: the trained policy's step minus theirs
rollout/staleness_max | steps | the same of the oldest sampled token
rollout/padding_fraction | fraction | padding among the tokens that the training step computed
dual/multiplier | advantage / discrepancy | lambda, the price of a unit of discrepancy, as this step used it
dual/violation | discrepancy | mean discrepancy, or the quantile of algorithm.budget, minus the tolerance;
    lambda rises where it is positive
dual/tolerance | discrepancy | c, the budget for the mean discrepancy, or for the quantile of algorithm.budget
dual/charge_share | fraction | charge in the update: C / (C + S), C = sum |charge| (1 - p), S = sum |advantage| (1 - p),
    as tokens weigh; of a charge in the loss C = sum lambda sum_a |dD / dz_a| / 2, z the logits
policy/clip_low_fraction | fraction | tokens whose gradient the lower clip of the ratio stops
policy/clip_high_fraction | fraction | tokens whose gradient the upper clip of the ratio stops
policy/dual_clip_fraction | fraction | tokens whose gradient the dual clip stops
policy/ratio_mean | ratio | mean importance ratio, train now over train at sampling
policy/ratio_max | ratio | largest importance ratio
policy/ratio_min | ratio | smallest importance ratio
policy/entropy | nats | mean entropy of the policy over sampled tokens
policy/loss | advantage | the minimized loss, mean of the updates that were made
policy/surrogate | advantage | its first term, recorded where the loss has others too
policy/kl | nats | its divergence from the initial policy, before algorithm.kl_coefficient
policy/router_loss | 1 | its load-balancing loss, before algorithm.router_aux_loss
moe/load_max_over_mean | ratio | tokens of the busiest expert over the mean, in the layer where it is largest
moe/load_entropy | fraction | entropy of the experts' load over its largest, mean of layers; 1 is even
moe/router_entropy | nats | mean entropy of the router's distribution for a token
moe/balance_loss | 1 | load-balancing loss before its weight; the experts of a token if all is even
moe/routing_agreement | fraction | replayed experts that the trainer's router would have chosen for the token
correction/dropped_fraction | fraction | tokens that corrections leave out of the loss
correction/truncated_fraction | fraction | kept tokens whose weight a bound of a correction changed
correction/weight_mean | 1 | mean weight by corrections over all tokens, 0 where dropped
correction/effective_sample_size | fraction | effective share of tokens under those weights; 1 is best
environment/turns_mean | 1 | turns of the policy in a completion, mean
environment/done_fraction | fraction | completions that the environment ended, not a limit
optimizer/grad_norm | norm | global gradient norm before clipping
optimizer/learning_rate | 1 | learning rate of the step's last update
optimizer/skipped_updates | updates | updates skipped: gradient, loss or advantage not finite
optimizer/skipped_in_row | updates | skipped updates since the last that was made
optimizer/skipped_share | fraction | skipped updates among those of the last 20 steps
optimizer/loss_scale | 1 | factor of the loss against underflow of float16 gradients
time/push | seconds | weights to the inference engine
time/generate | seconds | sampling the completions
time/verify | seconds | verifying the answers
time/noise_floor | seconds | the engine against itself, at the steps that measure it
time/pack | seconds | packing tokens into rows
time/step | seconds | the compiled training step
time/wait | seconds | with rollout.lag: the trainer waits for the sampler
time/engine_idle | seconds | with rollout.lag: the sampler waits for the trainer, pushes included
time/overlap | seconds | with rollout.lag: the parts of a step in turn, less its time: what overlap won
time/start_wait | seconds | with rollout.lag: Unix time at which the trainer's wait began
time/start_push | seconds | with rollout.lag: Unix time at which the push began
time/start_step | seconds | with rollout.lag: Unix time at which the training step began
time/start_generate | seconds | with rollout.lag: Unix time at which sampling this step's completions began
time/start_verify | seconds | with rollout.lag: Unix time at which the rest of the rewards began
time/start_noise_floor | seconds | with rollout.lag: Unix time at which measuring the noise floor began
time/start_pack | seconds | with rollout.lag: Unix time at which packing began
time/clock | seconds | Unix time at which the line was written
time/total | seconds | the whole step, from prompts to record
throughput/tokens_per_second | tokens / s | prompt and completion tokens over the whole step's time
throughput/sampled_tokens_per_second | tokens / s | sampled tokens over the time spent generating
"""
"""Name, unit and meaning of each metric with a fixed name, in the order to show them; indented lines go on."""


def _rows() -> Iterator[Metric]:
    for line in _TABLE.strip().replace("\n    ", " ").splitlines():
        yield Metric(*line.split(" | ", 2))
    for name in ALARMS:
        yield Metric(f"alarm/{name}", "0 or 1", f"1 while the alarm {name} is raised; observe/alarms.py has its rule")


METRICS: dict[str, Metric] = {metric.name: metric for metric in _rows()}
"""Name to `Metric`, in the order to show them. Those that name a task, a reward or a data source: see `metric_of`."""

_OF_REWARDS = {
    "mean": ("reward", "mean of the reward {}, before its weight, over the completions it gave a value"),
    "std": ("reward", "standard deviation of the reward {}, before its weight, over the completions it gave a value"),
    "failed": ("completions", "completions that the reward {} failed on: they get no value from it (rewards.on_error)"),
}
_OF_SOURCES = {
    "mean": ("reward", "mean reward over the completions of data source {}"),
    "std": ("reward", "standard deviation of the reward over the completions of data source {}"),
}
_PREFIXES = {
    "logged/": ("as logged", "{}: what reward functions logged under this name (log_metric), mean of the step"),
    "eval_logged/": ("as logged", "{}: what reward functions logged on a held-out task (log_metric)"),
    "eval_interval/": ("reward", "held-out {}, a bound of the 95% interval of avg@K: bootstrap over problems"),
    "eval_reward/": ("reward", "held-out {}: mean of this one of several rewards, before its weight"),
    "discrepancy/source/": ("discrepancy", "mean discrepancy of the completions of data source {}, each counted once"),
    "completion/source/": ("tokens", "mean length of the completions of data source {}"),
}


def form_of_score(name: str, values: Iterable[float], recorded: Iterable[str]) -> Callable[[float], str]:
    """Return how to write a held-out score: `percent` for a share; `number` for a sum of rewards or outside 0 .. 1.

    Args:
        name: of the metric, `eval/<task>/avg@K` or `eval/<task>/pass@K`.
        values: all its values.
        recorded: names of the run's metrics; a run whose reward is a sum has `eval_reward/`.
    """
    summed = "/avg@" in name and any(other.startswith("eval_reward/") for other in recorded)
    return number if summed or any(value < 0 or value > 1 for value in values) else percent


STEP_PHASES = ("push", "generate", "verify", "noise_floor", "pack", "step")
"""The parts of `time/total`, in the order a step runs them."""


def metric_of(name: str) -> Metric:
    """The table's row for `name`, made up from the name for `eval/<task>/avg@K` and `eval/<task>/pass@K`,
    `reward/<name>/mean`, `/std` and `/failed`, `reward/source/<source>/mean` and `/std`, and those of `_PREFIXES`.

    Args:
        name: a metric name. One that is in no table gets an empty unit and description, so that a reader
            of a newer or older run shows it all the same.
    """
    if name in METRICS:
        return METRICS[name]
    head, _, rest = name.partition("/")
    task, _, score = rest.rpartition("/")
    kind, at, samples = score.partition("@")
    if head == "eval" and task and at:
        if kind == "avg":
            return Metric(name, "reward", f"held-out {task}: mean reward over {samples} samples a problem")
        if kind == "pass":
            return Metric(name, "fraction", f"held-out {task}: problems solved by at least one of {samples} samples")
    for prefix, (unit, meaning) in _PREFIXES.items():
        if name.startswith(prefix) and (rest := name.removeprefix(prefix)):
            source = rest.rpartition("/")[0] if "/source/" in prefix else rest
            return Metric(name, unit, meaning.format(source))
    if head == "reward" and task:
        is_source = task.startswith("source/")
        if row := (_OF_SOURCES if is_source else _OF_REWARDS).get(score):
            return Metric(name, row[0], row[1].format(task.removeprefix("source/")))
    return Metric(name, "", "")

"""Every metric a run records: name, unit, meaning. The one table the report and the documentation read."""

from __future__ import annotations

from typing import NamedTuple

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


_TABLE = (
    Metric("reward/mean", "reward", "mean over the step's completions of the weighted sum of all rewards"),
    Metric("reward/std", "reward", "standard deviation of the reward over the step's completions"),
    Metric(
        "reward/all_equal_groups", "fraction", "prompts whose completions all got one reward: no advantage to learn"
    ),
    Metric("reward/without_value", "completions", "completions that no reward has a value for; they get reward 0"),
    Metric("reward/verifier_timeouts", "completions", "answers over the verifier's time limit; they get reward 0"),
    Metric("reward/verifier_errors", "completions", "answers the verifier raised on; they get reward 0"),
    Metric(
        "reward/verifier_over_budget",
        "completions",
        "answers undecided when the verifier's budget for the batch ran out; they get reward 0",
    ),
    Metric("reward/no_answer_fraction", "fraction", "completions without an answer, which get reward 0"),
    Metric("completion/length_mean", "tokens", "mean sampled tokens of a completion, end-of-sequence included"),
    Metric("completion/length_min", "tokens", "shortest completion"),
    *(Metric(f"completion/length_p{p}", "tokens", f"{p}th percentile of the lengths") for p in (10, 25, 50, 75, 90)),
    Metric("completion/length_max", "tokens", "longest completion"),
    Metric("completion/truncated_fraction", "fraction", "completions cut by the length limit"),
    Metric(
        "completion/beyond_vocabulary_fraction",
        "fraction",
        "sampled tokens whose id is beyond the tokenizer's: the model has more rows than it, and they have no text",
    ),
    Metric(
        "discrepancy/mean", "discrepancy", "token-weighted batch mean: what the dual step compares with the tolerance"
    ),
    Metric("discrepancy/p50", "discrepancy", "median over sampled tokens"),
    Metric("discrepancy/p99", "discrepancy", "99th percentile over sampled tokens"),
    Metric("discrepancy/max", "discrepancy", "largest over sampled tokens"),
    Metric("discrepancy/completions_over_tolerance", "fraction", "completions whose own mean exceeds the tolerance"),
    Metric(
        "discrepancy/broken_completions",
        "fraction",
        "completions whose own mean is above 0.1 and 10 times the median completion's",
    ),
    *(
        Metric(f"displacement/{name}", "nats", f"logit p_train - logit p_engine of the sampled token: {what}")
        for name, what in (
            ("mean", "mean"),
            ("abs_mean", "mean absolute value, which confidence does not shrink as it does |p - q|"),
            *((f"abs_p{q}", f"{q}th percentile of the absolute value") for q in (50, 95, 99)),
        )
    ),
    Metric("mismatch/k1", "nats", "mean of rollout - train log-probs: KL(rollout || train), unbiased, may be negative"),
    Metric("mismatch/k3", "nats", "the same KL by the non-negative low-variance estimator"),
    Metric("mismatch/pearson", "correlation", "Pearson correlation of train and rollout token probabilities"),
    Metric(
        "mismatch/effective_sample_size",
        "fraction",
        "effective share of tokens under train / rollout weights; 1 is best",
    ),
    Metric(
        "mismatch/noise_floor",
        "discrepancy",
        "mean discrepancy of the engine against itself in another batch shape, at steps 1, 17, 65, 257, ...",
    ),
    Metric(
        "mismatch/probe",
        "nats",
        "mean |log p_train - log p_engine| on fixed sequences, right after the push",
    ),
    Metric("mismatch/sampler", "discrepancy", "precision exact: of the sampler's own log-probs, which were replaced"),
    *(
        Metric(f"{part}/log_ratio_{name}", "nats", f"{meaning}, {how} over sampled tokens; recorded with rollout.lag")
        for part, meaning in (
            ("staleness", "log p_train now - log p_train under the weights that sampled"),
            ("mismatch", "log p_train under the weights that sampled - log p_engine"),
            ("gap", "log p_train now - log p_engine, the sum of staleness and mismatch"),
        )
        for name, how in (("mean", "mean"), ("abs_mean", "mean absolute value"), ("max", "largest absolute value"))
    ),
    Metric("rollout/dropped_completions", "completions", "left out because a log-prob was not finite"),
    Metric(
        "rollout/sampled_prompts", "prompts", "prompts sampled by dynamic sampling, those of replaced groups included"
    ),
    Metric("rollout/refill_rounds", "calls", "further calls of the engine by dynamic sampling"),
    Metric(
        "rollout/unfilled_groups", "prompts", "groups of all-equal rewards that dynamic sampling found no other for"
    ),
    Metric("rollout/staleness_mean", "steps", "mean age of the sampled tokens: the trained policy's step minus theirs"),
    Metric("rollout/staleness_max", "steps", "the same of the oldest sampled token"),
    Metric("rollout/padding_fraction", "fraction", "padding among the tokens that the training step computed"),
    Metric(
        "dual/multiplier", "advantage / discrepancy", "lambda, the price of a unit of discrepancy, as this step used it"
    ),
    Metric("dual/violation", "discrepancy", "mean discrepancy minus the tolerance; lambda rises where it is positive"),
    Metric("dual/tolerance", "discrepancy", "c, the budget for the mean discrepancy"),
    Metric(
        "dual/charge_share",
        "fraction",
        "charge in the update: C / (C + S), C = sum |charge| (1 - p), S = sum |advantage| (1 - p), as tokens weigh",
    ),
    Metric("policy/clip_low_fraction", "fraction", "tokens whose gradient the lower clip of the ratio stops"),
    Metric("policy/clip_high_fraction", "fraction", "tokens whose gradient the upper clip of the ratio stops"),
    Metric("policy/dual_clip_fraction", "fraction", "tokens whose gradient the dual clip stops"),
    Metric("policy/ratio_mean", "ratio", "mean importance ratio, train now over train at sampling"),
    Metric("policy/ratio_max", "ratio", "largest importance ratio"),
    Metric("policy/ratio_min", "ratio", "smallest importance ratio"),
    Metric("policy/entropy", "nats", "mean entropy of the policy over sampled tokens"),
    Metric("policy/loss", "advantage", "the minimized loss, mean of the updates that were made"),
    Metric("policy/surrogate", "advantage", "its first term, recorded where the loss has others too"),
    Metric("policy/kl", "nats", "its divergence from the initial policy, before algorithm.kl_coefficient"),
    Metric("policy/router_loss", "1", "its load-balancing loss, before algorithm.router_aux_loss"),
    Metric(
        "moe/load_max_over_mean",
        "ratio",
        "tokens of the busiest expert over the mean, in the layer where it is largest",
    ),
    Metric("moe/load_entropy", "fraction", "entropy of the experts' load over its largest, mean of layers; 1 is even"),
    Metric("moe/router_entropy", "nats", "mean entropy of the router's distribution for a token"),
    Metric("moe/balance_loss", "1", "load-balancing loss before its weight; the experts of a token if all is even"),
    Metric(
        "moe/routing_agreement",
        "fraction",
        "replayed experts that the trainer's router would have chosen for the token",
    ),
    Metric("correction/dropped_fraction", "fraction", "tokens that corrections leave out of the loss"),
    Metric("correction/truncated_fraction", "fraction", "kept tokens whose weight a bound of a correction changed"),
    Metric("correction/weight_mean", "1", "mean weight by corrections over all tokens, 0 where dropped"),
    Metric("correction/effective_sample_size", "fraction", "effective share of tokens under those weights; 1 is best"),
    Metric("environment/turns_mean", "1", "turns of the policy in a completion, mean"),
    Metric("environment/done_fraction", "fraction", "completions that the environment ended, not a limit"),
    Metric("optimizer/grad_norm", "norm", "global gradient norm before clipping"),
    Metric("optimizer/learning_rate", "1", "learning rate of the step's last update"),
    Metric("optimizer/skipped_updates", "updates", "updates skipped: gradient, loss or advantage not finite"),
    Metric("optimizer/skipped_in_row", "updates", "skipped updates since the last that was made"),
    Metric("optimizer/skipped_share", "fraction", "skipped updates among those of the last 20 steps"),
    Metric("optimizer/loss_scale", "1", "factor of the loss against underflow of float16 gradients"),
    Metric("time/push", "seconds", "weights to the inference engine"),
    Metric("time/generate", "seconds", "sampling the completions"),
    Metric("time/verify", "seconds", "verifying the answers"),
    Metric("time/noise_floor", "seconds", "the engine against itself, at the steps that measure it"),
    Metric("time/pack", "seconds", "packing tokens into rows"),
    Metric("time/step", "seconds", "the compiled training step"),
    Metric("time/wait", "seconds", "with rollout.lag: the trainer waits for the sampler"),
    Metric("time/engine_idle", "seconds", "with rollout.lag: the sampler waits for the trainer, pushes included"),
    Metric("time/overlap", "seconds", "with rollout.lag: the parts of a step in turn, less its time: what overlap won"),
    *(
        Metric(f"time/start_{phase}", "seconds", f"with rollout.lag: Unix time at which {what} began")
        for phase, what in (
            ("wait", "the trainer's wait"),
            ("push", "the push"),
            ("step", "the training step"),
            ("generate", "sampling this step's completions"),
            ("verify", "the rest of the rewards"),
            ("noise_floor", "measuring the noise floor"),
            ("pack", "packing"),
        )
    ),
    Metric("time/clock", "seconds", "Unix time at which the line was written"),
    Metric("time/total", "seconds", "the whole step, from prompts to record"),
    Metric("throughput/tokens_per_second", "tokens / s", "prompt and completion tokens over the whole step's time"),
    Metric("throughput/sampled_tokens_per_second", "tokens / s", "sampled tokens over the time spent generating"),
)

_TABLE += tuple(
    Metric(f"alarm/{name}", "0 or 1", f"1 while the alarm {name} is raised; observe/alarms.py has its rule")
    for name in ALARMS
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _TABLE}
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

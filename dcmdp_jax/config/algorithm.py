"""Settings of the algorithm, declared once each: a section of `config/settings.py`."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import jax

from dcmdp_jax.algorithm import discrepancy, distribution, dual, losses, penalties, trust_regions
from dcmdp_jax.algorithm.corrections import (
    CORRECTIONS,
    MASKS,
    OF_PREFIXES,
    TRUNCATIONS,
    of_single_tokens,
)
from dcmdp_jax.algorithm.remedies import Function, OwnRemedy, check_terms, check_values
from dcmdp_jax.errors import UserError, callback_error, error_place, naming
from dcmdp_jax.fields import setting
from dcmdp_jax.named_functions import Call, Functions, check_call, check_parameters, parse_calls
from dcmdp_jax.user_files import load_object

_TRACING = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.UnexpectedTracerError,
)
_CENTERING = "score_centering"
Parameters = dict[str, Any]
"""Parameters of a remedy by name."""
_REMEDIES: Mapping[str, tuple[str, Functions]] = {
    "method": (
        "penalty",
        {
            **penalties.PENALTIES,
            **dict.fromkeys(penalties.STATE_PENALTIES, penalties.PENALTIES["grpo"]),
        },
    ),
    "corrections": ("correction", {**CORRECTIONS, _CENTERING: distribution.score_centering}),
    "trust_region": ("policy-loss variant", trust_regions.TRUST_REGIONS),
    "loss": ("loss", losses.LOSSES),
}
"""Setting that names mitigations -> their kind, and ours by name."""


@dataclasses.dataclass(frozen=True)
class Remedies:
    """The functions that the settings name, with their parameters; see `algorithm.remedies`.

    Attributes:
        penalty: of the discrepancy.
        corrections: all of them, in their order.
        loss: with the trust region.
        single_tokens: the `corrections` that look at each token alone.
        whole_completions: the others, with score centering; none without.
    """

    penalty: Function
    corrections: tuple[Function, ...]
    loss: Function
    single_tokens: tuple[Function, ...]
    whole_completions: tuple[Function, ...]


@dataclasses.dataclass(frozen=True)
class AlgorithmSettings:
    """The method and its constants: docs/algorithm.md, sections 4 to 6 of the paper.

    Attributes:
        method: Penalty of the discrepancy: dc_grpo, dual_grpo, threshold_grpo, grpo, or a function
            of yours as path.py:function(parameter=value) (docs/remedies.md). dual_grpo: multiplier
            fixed at 1. state_tv, state_kl, state_delta: the loss is penalized for a state's
            discrepancy, from rollout.top_logprobs, and not the advantage. Source: paper [4, 5].
        measure: Discrepancy of a token: |p_train - p_inf|, |p_train / p_inf - 1|, |log p_train -
            log p_inf| or |logit p_train - logit p_inf|, which confidence does not shrink. Source:
            paper: diff.
        sided: two: absolute value. one: only p_train above p_inf is penalized. Source: paper: two.
        level: What is penalized. token: each token's discrepancy. sequence: its completion's mean.
            reward: that mean, in the reward, before the group's mean is taken (one forward pass
            more). Source: paper: token.
        multiplier: lambda_0, the multiplier of the first step. Source: paper [6.1]: 0.1 (8B), 0.05
            (30B-A3B).
        budget: Statistic of the tokens' discrepancy that c bounds and that moves lambda: mean, or a
            quantile over all tokens of the step. Source: paper: mean.
        tolerance: c, the bound of the mean discrepancy. Source: paper [6.1]: 0.0037 (8B), 0.0050
            (30B-A3B).
        tolerance_steps: Calibrate c on this many first steps, during which lambda stays at lambda_0
            and c at `tolerance`. Then c is tolerance_factor times the median over these steps of
            the mean discrepancy, or of the engine's noise floor, as last measured, where that is
            larger. 0: c is `tolerance`. Only with dc_grpo. Source: paper: c is given.
        tolerance_factor: Factor of that median. Below 1: less than the policy began with. Source:
            ours: the rule of dcmdp probe.
        dual_learning_rate: eta, step size of the dual ascent. Source: paper [6.1]: 1.0.
        multiplier_max: Upper end of lambda; the lower one is 0. The paper states none, and its
            lambda rises above 0.1. With lambda fixed at 1 runs collapsed on long completions
            (docs/evidence.md): watch the alert penalty. Source: ours.
        trust_region: What bounds an update: clip, dppo_tv, dppo_kl, drpo, ipo, cispo, sapo, vespo,
            acr, with parameters such as low and high, or a function of yours as
            path.py:function(parameter=value) (docs/remedies.md). clip bounds the ratio (low=0.2,
            high=0.24; dual: its largest value where the advantage is negative), dppo_tv the shift
            in probability, dppo_kl the binary KL in nats, drpo smoothly the shift. Source: paper
            [6.1]: clip, high 0.24; low is ours.
        loss: Loss of a token: surrogate, the negated objective of trust_region,
            log_ratio_squared(tau=0.001), which adds tau (log pi - log q)^2, likelihood (dcmdp sft),
            or a function of yours as path.py:function(parameter=value) (docs/remedies.md). Source:
            paper: surrogate.
        ratio_level: Importance ratio of each token, or one of each completion, the geometric mean
            of its tokens' (GSPO). Source: paper: token.
        ratio_denominator: Denominator of the importance ratio. train: the training stack. rollout:
            the inference engine. bypass: the inference engine, and p_train is not recomputed for
            mini-batches after the first, whose discrepancy then is that of the weights now (with
            rollout.lag it is recomputed, for the staleness). proximal: the training stack at the
            start of the step, and a token weighs by what the policy moved since it was sampled
            (rollout.lag; decoupled objective, docs/overlap.md). Source: paper: not stated;
            docs/algorithm.md.
        corrections: Corrections for engine mismatch in addition to the penalty, joined by commas,
            parameters in parentheses: tis(high=2),veto; docs/remedies.md lists them. Functions of
            yours as path.py:function(parameter=value). score_centering subtracts the expected
            score, from rollout.top_logprobs. Source: paper: none.
        correction_denominator: Tokens in the denominator of the loss: kept by the corrections, or
            all. Source: ours: peers differ, docs/translations.md.
        overlong_buffer: Soft overlong punishment (DAPO): over this many last tokens before
            rollout.max_completion_tokens the reward falls linearly by overlong_penalty. 0: none.
            Source: paper: none.
        overlong_penalty: Reward that a completion of full length loses to overlong_buffer. Source:
            DAPO: 1.
        drop_equal_groups: Leave completions out of the loss whose group's rewards are all equal:
            dynamic sampling (DAPO), with refill_rounds=0 without new groups in their place. Source:
            paper: off.
        refill_rounds: Dynamic sampling (DAPO): most further calls of the engine in a step, each
            with new prompts in place of the groups that drop_equal_groups leaves out. 0: none.
            Source: paper: off.
        aggregation: How tokens' losses become one. token_mean: DAPO. fixed_length: Dr. GRPO.
            Source: paper: seq_mean_token_mean.
        std_epsilon: Added to a group's standard deviation. Source: ours: as in the framework the
            paper trained with.
        normalize_std: Divide advantages by their group's standard deviation.
        mask_truncated: Leave truncated completions out of the loss: overlong filtering (DAPO).
            Source: ours: off.
        kl_coefficient: Weight of the KL divergence to the initial policy. Source: paper: no KL.
        kl_estimator: Estimator of that divergence.
        router_aux_loss: Weight of the load-balancing loss of a mixture of experts, over a
            mini-batch. 0: none. Source: ours: not stated in the paper; Qwen3-MoE's config.json has
            0.001.
    """

    method: str = setting("dc_grpo")
    measure: str = setting("diff", choices=get_args(discrepancy.Measure))
    sided: str = setting("two", choices=get_args(discrepancy.Sided))
    level: str = setting("token", choices=get_args(discrepancy.PenaltyLevel))
    multiplier: float = setting(0.1, unit="advantage per discrepancy", minimum=0)
    budget: str = setting("mean", choices=("mean", *dual.QUANTILES))
    tolerance: float = setting(0.0037, unit="of the measure", minimum=0)
    tolerance_steps: int = setting(0, unit="steps", minimum=0, maximum=10_000)
    tolerance_factor: float = setting(dual.BUDGET_ROOM, minimum=1e-6)
    dual_learning_rate: float = setting(1.0, minimum=0)
    multiplier_max: float = setting(dual.MULTIPLIER_MAX)
    trust_region: str = setting("clip")
    loss: str = setting("surrogate")
    ratio_level: str = setting("token", choices=get_args(discrepancy.Level))
    ratio_denominator: str = setting("train", choices=("train", "rollout", "bypass", "proximal"))
    corrections: str = setting("")
    correction_denominator: str = setting("kept", choices=("kept", "all"))
    overlong_buffer: int = setting(0, unit="tokens", minimum=0)
    overlong_penalty: float = setting(1.0, unit="reward", minimum=0)
    drop_equal_groups: bool = setting(False)
    refill_rounds: int = setting(0, unit="calls", minimum=0)
    aggregation: str = setting("seq_mean_token_mean", choices=get_args(losses.Aggregation))
    std_epsilon: float = setting(1e-6, minimum=0)
    normalize_std: bool = setting(True)
    mask_truncated: bool = setting(False)
    kl_coefficient: float = setting(0.0, minimum=0)
    kl_estimator: str = setting("k3", choices=("k2", "k3"), why="the expected gradient of k1 is 0")
    router_aux_loss: float = setting(0.0, minimum=0)

    def calls(self, name: str) -> list[Call]:
        """The remedies that a setting names: "method", "corrections", "trust_region" or "loss".

        Raises:
            UserError: in one line, for text of another form.
        """
        with naming(f"config.algorithm.{name}"):
            calls = parse_calls(getattr(self, name), _REMEDIES[name][1])
            if name != "corrections" and len(calls) != 1:
                raise UserError(f"got {getattr(self, name)!r}, must name one function")
        return calls

    @property
    def fixed_multiplier(self) -> float | None:
        """The constant multiplier of a method without dual ascent; None if it moves."""
        return penalties.FIXED_MULTIPLIERS.get(self.calls("method")[0].function)

    @property
    def begins_at_cap(self) -> bool:
        """Whether lambda moves and can only fall in the first step."""
        return (
            self.fixed_multiplier is None
            and self.dual_learning_rate > 0
            and self.multiplier >= self.multiplier_max
        )

    @property
    def bounded_metric(self) -> str:
        """Name of the metric that c bounds."""
        if self.budget == "mean":
            return "discrepancy/mean"
        return "discrepancy/spent"

    @property
    def measured_steps(self) -> int:
        """Number of first steps that c is measured on; 0 if c is given or lambda does not move."""
        return self.tolerance_steps if self.fixed_multiplier is None else 0

    @property
    def drops_tokens(self) -> bool:
        """Whether the `corrections` may leave tokens out of the denominator of the loss."""
        drops = any(
            call.function not in (*TRUNCATIONS, _CENTERING) for call in self.calls("corrections")
        )
        return (
            drops and self.correction_denominator == "kept" and self.aggregation != "fixed_length"
        )

    @property
    def centers(self) -> bool:
        """Whether the expected score is subtracted, which takes the engine's top-k tokens."""
        return any(call.function == _CENTERING for call in self.calls("corrections"))

    @property
    def state_penalty(self) -> str | None:
        """Name of the penalty in the loss, of the engine's top-k tokens; None without one."""
        name = self.calls("method")[0].function
        if name not in penalties.STATE_PENALTIES:
            return None
        return name

    @property
    def differentiates_head(self) -> bool:
        """Whether the gradient flows through the log-probs of the engine's top-k tokens."""
        return self.centers or self.state_penalty is not None

    def remedies(self) -> Remedies:
        """The functions that the settings name.

        Raises:
            UserError: in one line, naming setting, function and what is wrong.
        """
        penalty = self._only_function("method")

        corrections = []
        single_tokens = []
        whole_completions = []
        for call in self.calls("corrections"):
            if call.function == _CENTERING:
                continue
            correction = _bind("corrections", call)
            corrections.append(correction)
            if of_single_tokens(call.function, call.parameters):
                single_tokens.append(correction)
            elif self.centers:
                whole_completions.append(correction)

        loss = self._only_function("loss")
        if not isinstance(loss, OwnRemedy):  # a user's loss has no trust region
            loss = functools.partial(loss, trust_region=self._only_function("trust_region"))
        return Remedies(
            penalty=penalty,
            corrections=tuple(corrections),
            loss=loss,
            single_tokens=tuple(single_tokens),
            whole_completions=tuple(whole_completions),
        )

    def _only_function(self, name: str) -> Function:
        (call,) = self.calls(name)
        return _bind(name, call)


def canonical(algorithm: AlgorithmSettings) -> AlgorithmSettings:
    """The remedies without parameters that have their default: what does the same is the same."""

    def changed(defaults: Parameters, parameters: Parameters) -> Parameters:
        return {name: value for name, value in parameters.items() if defaults.get(name) != value}

    return _with_parameters(algorithm, changed)


def spelled_out(algorithm: AlgorithmSettings) -> AlgorithmSettings:
    """The remedies with every number of theirs, for a run's record: a default may change."""
    return _with_parameters(algorithm, lambda defaults, parameters: defaults | parameters)


def _with_parameters(
    algorithm: AlgorithmSettings, change: Callable[[Parameters, Parameters], Parameters]
) -> AlgorithmSettings:
    """The settings with other parameters of their remedies: `change(defaults, parameters)`."""
    changed: dict[str, str] = {}
    for name, (_, built_in) in _REMEDIES.items():
        try:
            calls = parse_calls(getattr(algorithm, name))
        except ValueError:
            continue  # the checks say what is wrong
        texts = []
        for call in calls:
            defaults = {}
            if call.function in built_in:
                for parameter in inspect.signature(built_in[call.function]).parameters.values():
                    if isinstance(parameter.default, int | float | str):
                        defaults[parameter.name] = parameter.default
            texts.append(str(Call(call.function, change(defaults, call.parameters))))
        changed[name] = ",".join(texts)
    return dataclasses.replace(algorithm, **changed)


def algorithm_rules(
    algorithm: AlgorithmSettings, max_completion_tokens: int
) -> Iterator[tuple[Any, ...]]:
    """Broken rules between settings of the algorithm, see `checks.Broken`.

    No function of a user is imported.

    Raises:
        UserError: in one line, for a function that is not there, or parameters not of it.
    """
    own_names = []
    for name, (_, built_in) in _REMEDIES.items():
        for call in algorithm.calls(name):
            with naming(f"config.algorithm.{name}"):
                check_call(call, built_in)
            if call.own:
                own_names.append(call.name)
            elif "trust_region" not in call.parameters:
                _check_ours(name, str(call))
    for name in own_names:
        if own_names.count(name) > 1:
            yield (
                "algorithm",
                "two functions have this name, as their metrics would; rename one",
                name,
            )

    (loss,) = algorithm.calls("loss")
    if loss.own and algorithm.trust_region != "clip":
        yield (
            "algorithm.loss",
            "takes no trust_region, which bounds the surrogate alone; leave one of them out",
        )
    if "trust_region" in loss.parameters and not loss.own:
        yield "algorithm.loss", "takes no parameters; set them in trust_region"
    denominator = algorithm.ratio_denominator
    for call in algorithm.calls("corrections"):
        weighs_already = call.function in TRUNCATIONS or call.function in MASKS
        if denominator in ("rollout", "bypass") and weighs_already:
            yield (
                "algorithm.corrections",
                f"ratio_denominator={denominator} weighs by p_train / p_rollout already; leave "
                "it out",
                call.function,
            )
        if algorithm.centers and (call.own or call.function in OF_PREFIXES):
            yield (
                "algorithm.corrections",
                "with score_centering, which needs a weight of each token or completion; leave "
                "one of them out",
                call.function,
            )
    if algorithm.centers and algorithm.calls("trust_region")[0].function == "vespo":
        yield (
            "algorithm.trust_region",
            "weighs whole completions, score_centering single tokens; leave one of them out",
        )
    if algorithm.level == "reward" and (denominator == "bypass" or ":" in algorithm.method):
        yield (
            "algorithm.level",
            "needs a method of ours and not ratio_denominator=bypass; set "
            "ratio_denominator=rollout or level=token",
        )
    if algorithm.state_penalty and algorithm.level != "token":
        yield (
            "algorithm.level",
            f"with method={algorithm.method}, which penalizes states; leave it at token",
        )
    if algorithm.refill_rounds and not algorithm.drop_equal_groups:
        yield (
            "algorithm.refill_rounds",
            "it replaces groups that drop_equal_groups leaves out, set that to true",
        )
    if algorithm.overlong_buffer > max_completion_tokens:
        yield (
            "algorithm.overlong_buffer",
            f"must be at most rollout.max_completion_tokens={max_completion_tokens}",
        )


def check_own_remedies(algorithm: AlgorithmSettings) -> None:
    """Import the functions of a user and compute each on a few tokens.

    Raises:
        UserError: in one line, naming setting and function, for one that can't be imported or
            called, raises, or returns something else than its kind does, or values that are not
            finite.
    """
    for name, (kind, _) in _REMEDIES.items():
        for call in algorithm.calls(name):
            if call.own:
                _check_own(name, kind, call)


def _bind(name: str, call: Call) -> Function:
    if not call.own:
        return functools.partial(_REMEDIES[name][1][call.function], **call.parameters)
    with naming(f"config.algorithm.{name}"):
        function = load_object(call.function, "function")
        check_parameters(call, function)
    return OwnRemedy(call.name, function, call.parameters)


@functools.cache
def _check_ours(name: str, text: str) -> None:
    """Check the parameters of a function of ours, by tracing it."""
    kind, built_in = _REMEDIES[name]
    (call,) = parse_calls(text)
    try:
        check_terms(kind, functools.partial(built_in[call.function], **call.parameters))
    except ValueError as error:
        raise UserError(f"config.algorithm.{name}: {call}: {error}") from None


def _check_own(name: str, kind: str, call: Call) -> None:
    function = _bind(name, call)
    try:
        check_terms(kind, function)
        check_values(kind, function)
    except (Exception, SystemExit) as error:
        # JAX's own messages go on for a page.
        message = (str(error).splitlines() or [""])[0]
        if type(error) is not ValueError or not message.startswith("returned "):
            module = call.function.rpartition(":")[0]
            raised = callback_error(error)
            if not raised:
                raised = f"{type(error).__name__}: {message}{error_place(error, module)}"
            message = f"raised {raised}"
            if isinstance(error, _TRACING):
                message += "; it is compiled: write jnp.where for `if`, jax.numpy for numpy"
        raise UserError(f"config.algorithm.{name}: {call}: {message}") from error

"""Settings of the algorithm, declared once each as in `config/settings.py`, of which they are a part."""

from __future__ import annotations

import dataclasses
import difflib
import re
from typing import get_args

from dcmdp_jax.algorithm.corrections import (
    CORRECTIONS,
    DROPS_NOTHING,
    WEIGHTS,
    Correction,
    chain,
    make_correction,
)
from dcmdp_jax.algorithm.discrepancy import RATIO_LIMIT, Level, Measure, Sided
from dcmdp_jax.algorithm.losses import TRUST_REGIONS, Aggregation
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.signals import KL_WEIGHTS
from dcmdp_jax.config.fields import setting
from dcmdp_jax.errors import UserError
from dcmdp_jax.inputs import shorten

_CLAMPED = "log-ratios are clamped to 20 nats: no ratio or discrepancy is larger"
_PART = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*(?:,|$)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class AlgorithmSettings:
    """The method and its constants: docs/algorithm.md, sections 4 to 6 of the paper."""

    method: str = setting(
        "dc_grpo", "Penalty of the discrepancy. dual_grpo: multiplier fixed at 1. excess_grpo: dc_grpo above c alone.",
        source="paper [4, 5]",
        choices=tuple(PENALTIES),
    )  # fmt: skip
    measure: str = setting(
        "diff", "Discrepancy of a token: |p_train - p_inf|, |p_train / p_inf - 1| or |log p_train - log p_inf|.",
        source="paper: diff", choices=get_args(Measure),
    )  # fmt: skip
    sided: str = setting(
        "two", "two: absolute value. one: only p_train above p_inf is charged.", source="paper: two",
        choices=get_args(Sided),
    )  # fmt: skip
    ratio_limit: float = setting(
        RATIO_LIMIT, "Most that measure=ratio gives a token: without it one token of p_inf near 0 would be charged up "
        "to 4.85e8.", source="ours: the paper has no bound; its measure, diff, is at most 1", minimum=1e-6,
        limit=(5e8, _CLAMPED),
    )  # fmt: skip
    level: str = setting(
        "token", "What is charged: each token's discrepancy, or its completion's mean.", source="paper: token",
        choices=get_args(Level),
    )  # fmt: skip
    multiplier: float = setting(
        0.1, "lambda_0, the multiplier of the first step.", unit="advantage per discrepancy",
        source="paper [6.1]: 0.1 (8B), 0.05 (30B-A3B)",
    )  # fmt: skip
    tolerance: float = setting(
        0.0037, "c, the budget of the mean discrepancy.", unit="of the measure",
        source="paper [6.1]: 0.0037 (8B), 0.0050 (30B-A3B)", minimum=0, limit=(5e8, _CLAMPED),
    )  # fmt: skip
    tolerance_steps: int = setting(
        0, "Measure c on this many first steps: lambda stays at lambda_0 and c at `tolerance`; then c is a quantile of "
        "their mean discrepancies, each at least the engine's noise floor in that step. 0: c is `tolerance`. Only "
        "with dc_grpo and excess_grpo.",
        unit="steps", source="paper: c is given",
        minimum=0, limit=(10_000, "they are all kept in the state"),
    )  # fmt: skip
    tolerance_quantile: float = setting(0.9, "Quantile of tolerance_steps.", source="ours", minimum=0, maximum=1)
    dual_learning_rate: float = setting(
        1.0, "eta, step size of the dual ascent.", source="paper [6.1]: 1.0", minimum=0,
        limit=(1e9, "there the smallest violation takes lambda from end to end"),
    )  # fmt: skip
    multiplier_min: float = setting(0.0, "Lower end of lambda.", source="ours: not stated in the paper", minimum=0)
    multiplier_max: float = setting(
        1.0, "Upper end of lambda.", source="ours: not stated in the paper",
        limit=(1e6, "at 1 a discrepancy of 1 costs as much as the advantage of a good answer earns"),
    )  # fmt: skip
    clip_low: float = setting(
        0.2, "Importance ratios are clipped to [1 - clip_low, 1 + clip_high]; or the size of another trust_region.",
        source="ours: not stated in the paper", minimum=0, maximum=0.999999,
    )  # fmt: skip
    clip_high: float = setting(
        0.24, "Importance ratios are clipped to [1 - clip_low, 1 + clip_high]; or the size of another trust_region.",
        source="paper [6.1]: 0.24", minimum=0, limit=(5e8, _CLAMPED),
    )  # fmt: skip
    trust_region: str = setting(
        "clip",
        "What bounds an update, its size being clip_low and clip_high: clip, of the ratio; dppo_tv, of the shift in "
        "probability; dppo_kl, of the binary KL in nats; drpo, smooth, of the shift in probability.",
        source="paper: clip", choices=tuple(TRUST_REGIONS),
    )  # fmt: skip
    dual_clip: float = setting(
        0.0, "Largest importance ratio of tokens with a negative advantage, above 1. 0: none.",
        source="paper: none; verl has 3", minimum=0, limit=(5e8, _CLAMPED),
    )  # fmt: skip
    ratio_level: str = setting(
        "token", "Importance ratio of each token, or one of each completion, the geometric mean of its tokens' (GSPO).",
        source="paper: token", choices=get_args(Level),
    )  # fmt: skip
    ratio_denominator: str = setting(
        "train",
        "Denominator of the importance ratio. train: the training stack. rollout: the inference engine. bypass: the "
        "inference engine, and p_train is not recomputed for mini-batches after the first, whose discrepancy then is "
        "that of the weights now.",
        source="paper: not stated; docs/algorithm.md", choices=("train", "rollout", "bypass"),
    )  # fmt: skip
    corrections: str = setting(
        "",
        "Corrections for engine mismatch beside the penalty, joined by commas, parameters in parentheses: "
        "tis(high=2),veto. docs/remedies.md lists them.", source="paper: none",
    )  # fmt: skip
    correction_denominator: str = setting(
        "kept", "Tokens in the denominator of the loss: those that the corrections keep, or all.",
        source="ours: peers differ, docs/remedies.md", choices=("kept", "all"),
    )  # fmt: skip
    overlong_buffer: int = setting(
        0, "Soft overlong punishment (DAPO): over this many last tokens before rollout.max_completion_tokens the "
        "reward falls linearly by overlong_penalty. 0: none.", unit="tokens", source="paper: none", minimum=0,
    )  # fmt: skip
    overlong_penalty: float = setting(
        1.0, "Reward that a completion of full length loses to overlong_buffer.", unit="reward",
        source="DAPO: 1", minimum=0, limit=(1e6, "a correct answer earns 1"),
    )  # fmt: skip
    drop_equal_groups: bool = setting(
        False, "Leave completions out of the loss whose group's rewards are all equal: dynamic sampling (DAPO), with "
        "refill_rounds=0 without new groups in their place.", source="paper: off",
    )  # fmt: skip
    refill_rounds: int = setting(
        0, "Dynamic sampling (DAPO): most further calls of the engine in a step, each with new prompts in place of the "
        "groups that drop_equal_groups leaves out. 0: none.", unit="calls", source="paper: off", minimum=0,
        limit=(100, "each is a call of the engine"),
    )  # fmt: skip
    aggregation: str = setting(
        "seq_mean_token_mean", "How tokens' losses become one. token_mean: DAPO. fixed_length: Dr. GRPO.",
        source="paper: seq_mean_token_mean", choices=get_args(Aggregation),
    )  # fmt: skip
    std_ddof: int = setting(
        1, "Degrees of freedom taken from a group's standard deviation.",
        source="ours: as in the framework the paper trained with", minimum=0, maximum=1,
    )  # fmt: skip
    std_epsilon: float = setting(
        1e-6, "Added to a group's standard deviation.", source="ours: as in the framework the paper trained with",
        minimum=0, limit=(1e6, "it only keeps the division by a standard deviation finite"),
    )  # fmt: skip
    normalize_std: bool = setting(True, "Divide advantages by their group's standard deviation.")
    mask_truncated: bool = setting(
        False, "Leave truncated completions out of the loss: overlong filtering (DAPO).", source="ours: off"
    )
    kl_coefficient: float = setting(
        0.0, "Weight of the KL divergence to the initial policy.", source="paper: no KL", minimum=0,
        limit=(1e6, "the loss itself is of the order of 1"),
    )  # fmt: skip
    kl_estimator: str = setting(
        "k3", "Estimator of that divergence.", choices=("k2", "k3"),
        why="k1 is an estimate and no loss: its expected gradient is 0",
    )  # fmt: skip
    kl_correction: str = setting(
        "none", "What corrections do to that divergence. none: its mean is over all tokens. drop: over the tokens that "
        "they keep. weigh: they also multiply it.", source="ours: as verl and TRL", choices=tuple(KL_WEIGHTS),
    )  # fmt: skip
    router_aux_loss: float = setting(
        0.0, "Weight of the load-balancing loss of a mixture of experts, over a mini-batch. 0: none.",
        source="ours: not stated in the paper; Qwen3-MoE's config.json has 0.001", minimum=0,
        limit=(1e6, "the loss itself is of the order of 1"),
    )  # fmt: skip

    @property
    def correction(self) -> Correction | None:
        """The joined `corrections`; None for none.

        Raises:
            UserError: in one line, naming what is wrong and what is allowed.
        """
        return chain([_make(name, parameters) for name, parameters in _parse(self.corrections)])

    @property
    def drops_tokens(self) -> bool:
        """Whether the `corrections` may leave tokens out of the denominator of the loss."""
        drops = any(name not in DROPS_NOTHING for name, _ in _parse(self.corrections))
        return drops and self.correction_denominator == "kept" and self.aggregation != "fixed_length"


def check_algorithm(algorithm: AlgorithmSettings, max_completion_tokens: int) -> None:
    """Check settings of the algorithm against each other.

    Raises:
        UserError: in one line, naming setting, value and what is allowed.
    """
    _ = algorithm.correction
    if algorithm.ratio_denominator != "train":
        for name, _ in _parse(algorithm.corrections):
            if name in WEIGHTS:
                raise UserError(
                    f"config.algorithm.corrections: got {name} with ratio_denominator={algorithm.ratio_denominator}, "
                    "whose ratio weighs by p_train / p_rollout already; leave one of them out"
                )
    if 0 < algorithm.dual_clip <= 1:
        raise UserError(f"config.algorithm.dual_clip: got {algorithm.dual_clip}, must be above 1, or 0 for none")
    if algorithm.trust_region == "drpo" and not min(algorithm.clip_low, algorithm.clip_high):
        raise UserError(
            f"config.algorithm.clip_low, clip_high: got {algorithm.clip_low}, {algorithm.clip_high} with "
            "trust_region=drpo, which divides by them; must be above 0"
        )
    if algorithm.refill_rounds and not algorithm.drop_equal_groups:
        raise UserError(
            f"config.algorithm.refill_rounds: got {algorithm.refill_rounds} with drop_equal_groups=false; it replaces "
            "the groups that drop_equal_groups leaves out, set that to true"
        )
    if algorithm.overlong_buffer > max_completion_tokens:
        raise UserError(
            f"config.algorithm.overlong_buffer: got {algorithm.overlong_buffer}, must be at most "
            f"rollout.max_completion_tokens={max_completion_tokens}"
        )


def _parse(text: str) -> list[tuple[str, dict[str, float]]]:
    """`tis(high=2),veto` as [("tis", {"high": 2.0}), ("veto", {})]."""
    found, position = [], 0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            raise _error(shorten(text[position:]), "write name or name(parameter=number), joined by commas")
        position = part.end()
        found.append((part[1], _parse_parameters(part[1], part[2] or "")))
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise _error(f"{twice[0]} twice", "name it once")
    return found


def _parse_parameters(name: str, text: str) -> dict[str, float]:
    parameters = {}
    for word in text.split(",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        try:
            if not (equals and word.isascii()) or key in parameters:
                raise ValueError
            parameters[key] = float(value)
        except ValueError:
            hint = "parameters are name=number, each once, as in tis(high=2)"
            raise _error(f"{name}({shorten(text)})", hint) from None
    return parameters


def _make(name: str, parameters: dict[str, float]) -> Correction:
    if name not in CORRECTIONS:
        near = difflib.get_close_matches(name, CORRECTIONS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(CORRECTIONS)}"
        raise _error(shorten(name), hint)
    try:
        return make_correction(name, parameters)
    except ValueError as error:
        raise UserError(f"config.algorithm.corrections: {error}") from None


def _error(got: str, hint: str) -> UserError:
    return UserError(f"config.algorithm.corrections: got {got}; {hint}")

"""Versions of a run's config.json, and the settings that only earlier ones have.

A new setting needs nothing here: a config.json without it gets the default, which therefore must do what was done
before. A setting that goes gets an entry in `REMOVED`, and `VERSION` is raised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import flatten, replace_value
from dcmdp_jax.inputs import shorten

VERSION = 7
"""Version of config.json in a run directory, raised when a setting is removed. Runs without one have version 0."""


@dataclasses.dataclass(frozen=True)
class Removed:
    """A setting that older runs have.

    Attributes:
        version: First version without the setting.
        meaningless: Values that do what is done without the setting. None: all, since it never changed what is learned.
        why: Reason, or remedy.
        values: Removed values of a setting that stays. Empty: the setting itself was removed.
    """

    version: int
    meaningless: tuple[Any, ...] | None
    why: str
    values: tuple[Any, ...] = ()


_RESUME = "resume with the version that began the run"
REMOVED = {
    "rollout.top_p": Removed(1, (1.0,), "the trainer's own distribution was not cut with the engine's"),
    "algorithm.dual_window": Removed(2, (1,), "the dual update takes each step's own mean, as Eq. 11 does"),
    "algorithm.dual_proportional": Removed(2, (0.0,), "PID control of lambda is gone; eta alone moves it"),
    "algorithm.dual_derivative": Removed(2, (0.0,), "PID control of lambda is gone; eta alone moves it"),
    "rollout.vllm.expert_parallel": Removed(1, (False,), "vLLM's expert parallelism is not supported"),
    "rollout.partial": Removed(3, (False,), "interrupted completions made steps slower and runs not repeatable"),
    "rollout.old_logprobs": Removed(3, None, "they are kept"),
    "algorithm.level": Removed(4, (), f"its study is kept (docs/evidence_appendix.md); {_RESUME}", ("state",)),
    "algorithm.method": Removed(4, (), f"docs/remedies.md has it as a function of yours; {_RESUME}", ("excess_grpo",)),
    "algorithm.kl_correction": Removed(4, ("none",), "corrections leave the divergence from the initial policy alone"),
    "training.max_skipped_share": Removed(4, (0.2,), "a run ends when a fifth of the updates of 20 steps were skipped"),
    "algorithm.multiplier_min": Removed(5, (0.0,), "lambda falls to 0: no run set another lower end"),
    "algorithm.std_ddof": Removed(5, (1,), "a group's standard deviation has n - 1, as in TRL and verl"),
    "model.architecture.rope_theta": Removed(5, (10000.0,), "fresh models have 10000; others their config.json"),
    "model.architecture.tie_word_embeddings": Removed(5, (True,), "fresh models have one matrix for both ends"),
    "model.architecture.norm_topk_prob": Removed(5, (True,), "fresh models normalize the experts' probabilities"),
    "algorithm.ratio_limit": Removed(6, (10.0,), "measure=ratio gives a token at most 10"),
    "algorithm.tolerance_quantile": Removed(6, (0.5,), "c is tolerance_factor times the median of the first steps"),
    "training.max_skipped_in_row": Removed(6, None, "8 skipped updates in a row stop a run"),
    "observe.rollouts_max_gib": Removed(6, None, "rollouts/ holds 1 GiB; set rollouts_every_steps"),
    "rollout.fitted_rows": Removed(7, None, "a run's config.json keeps it beside the settings"),
    "rollout.vllm.max_restarts": Removed(6, None, "the sixth failure in a row ends a run"),
    "rollout.vllm.stall_timeout_s": Removed(6, None, "a sidecar silent for 300 seconds is restarted"),
} | dict.fromkeys(
    ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip"),
    Removed(4, (), "write trust_region=clip(low=0.2,high=0.24,dual=0) with the numbers"),
)


def without_removed(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a saved config that are settings still.

    A removed setting is ignored if its value does what is done without it.

    Raises:
        UserError: in one line, for a newer version, or a removed setting with another value.
    """
    values = {name: value for name, value in saved.items() if name != "fitted_rows"}
    version = values.pop("config_version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise UserError(f"config_version: got {shorten(version)}, this program knows versions up to {VERSION}")
    if version < 4 and isinstance(values.get("algorithm"), Mapping):
        values["algorithm"] = _with_sizes(values["algorithm"])
    flat, kept = flatten(values), {}
    if not flat.get("algorithm.tolerance_steps"):
        flat.pop("algorithm.tolerance_quantile", None)  # c was given: it did nothing, and its default was another one
    for name, removed in REMOVED.items():
        if version >= removed.version or name not in flat:
            continue
        said, refused = f"config.{name}: got {shorten(flat[name])}", flat[name] in removed.values
        if not removed.values:
            value = flat.pop(name)
            refused = removed.meaningless is not None and value not in removed.meaningless
        if refused:
            raise UserError(f"{said}, {'which is gone' if removed.values else 'no setting any more'}; {removed.why}")
    for name, value in flat.items():
        replace_value(kept, name, value)
    return kept


def _with_sizes(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """Add the sizes that were settings of their own to a built-in `trust_region` without parentheses."""
    sizes = {"clip_low": 0.2, "clip_high": 0.24, "dual_clip": 0.0}
    values = {"trust_region": "clip"} | {name: value for name, value in algorithm.items() if name not in sizes}
    low, high, dual = (algorithm.get(name, default) for name, default in sizes.items())
    if str(values["trust_region"]).isidentifier():
        values["trust_region"] += f"(low={low},high={high})"
    if dual:
        if not values["trust_region"].startswith("clip("):
            raise UserError(f"config.algorithm.dual_clip: got {shorten(dual)}, which goes with trust_region=clip alone")
        values["trust_region"] = values["trust_region"].removesuffix(")") + f",dual={dual})"
    return values

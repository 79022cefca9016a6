"""Base and scaling of the rotary embedding, from and to the fields of a config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.models.families import Family
from dcmdp_jax.models.hf_fields import in_range

SLIDING = "sliding_attention"
FULL = "full_attention"
LINEAR = "linear_attention"
"""Kinds of layers in config.json."""
_PARTIAL = "partial_rotary_factor"
# The others: which dimensions turn by which coordinate of an image; all coordinates of a text are
# the same.
_UNSCALED = (_PARTIAL, "mrope_section", "mrope_interleaved")
# Rotary scaling -> the fields it must have, and those it may have.
_ROPE_FIELDS = {
    "linear": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": (
        ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        (),
    ),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies, in the fields of Hugging Face's `rope_parameters`.

    Attributes:
        kind: "default", "linear", "yarn" or "llama3".
        factor: how many times the context is stretched.
        original_max_position_embeddings: context length, in tokens, of the unscaled model.
        attention_factor: multiplies cos and sin (yarn); 0 means derive it from the other fields.
        beta_fast, beta_slow: rotations that bound yarn's ramp.
        mscale, mscale_all_dim: yarn's optional attention scale; 0 means absent.
        truncate: round yarn's ramp bounds to whole dimensions.
        low_freq_factor, high_freq_factor: llama3's wavelength bounds.
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def read_ropes(
    fields: Mapping[str, Any], family: Family, max_position_embeddings: int
) -> dict[str, Any]:
    """Fields of `ModelConfig` for the rotary embedding of all layers, and of sliding ones.

    transformers 5 writes `rope_parameters` of such a family by kind of layer.

    Raises:
        UserError: naming the field, for a scaling that is unknown, incomplete, or given twice with
            different values.
    """
    kinds = fields.get("rope_parameters")
    ropes = {}
    if family.partial_rotary:
        section = {}
        if isinstance(kinds, dict):
            section = kinds
        share = section.get(_PARTIAL, fields.get(_PARTIAL, family.partial_rotary))
        ropes[_PARTIAL] = in_range(_PARTIAL, share)
        fields = {**fields, _PARTIAL: None}
        if section:
            fields["rope_parameters"] = {
                name: value for name, value in section.items() if name not in _UNSCALED
            }

    sliding_fields = {}
    if family.sliding_rope and isinstance(kinds, dict) and (SLIDING in kinds or FULL in kinds):
        sliding_fields = {"rope_parameters": kinds.get(SLIDING)}
        fields = {**fields, "rope_parameters": kinds.get(FULL)}
    theta, scaling = _rope(fields, max_position_embeddings, family.rope_theta)
    ropes |= {"rope_theta": theta, "rope_scaling": scaling}
    if not family.sliding_rope:
        return ropes

    base = theta
    local_base = fields.get("rope_local_base_freq")
    if local_base is not None:
        base = in_range("rope_local_base_freq", local_base)
    sliding_theta, sliding_scaling = _rope(sliding_fields, max_position_embeddings, base)
    if sliding_scaling != RopeScaling():
        raise UserError(
            f"config.json: rope_parameters of {SLIDING} is scaled ({sliding_scaling.kind}), must "
            "be default"
        )
    if sliding_theta != theta or scaling != RopeScaling():
        ropes["sliding_rope_theta"] = sliding_theta
    return ropes


def _rope(
    fields: Mapping[str, Any], max_position_embeddings: int, base: float
) -> tuple[float, RopeScaling]:
    """Base and scaling by `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    As transformers: an empty section counts as absent, `rope_theta` and
    `original_max_position_embeddings` may stand outside. Where it would take one of two values that
    disagree, both are refused: engines and releases differ.
    """
    names = ("rope_scaling", "rope_parameters")
    for name in names:
        section = fields.get(name)
        if section is not None and not isinstance(section, dict):
            raise UserError(f"config.json: {name} is {shorten(section)}, must be an object or null")
    sections = [name for name in names if fields.get(name)] or ["rope_scaling"]
    ropes = [_rope_section(name, fields, max_position_embeddings, base) for name in sections]
    if len(set(ropes)) > 1:
        descriptions = []
        for name, (theta, _) in zip(sections, ropes, strict=True):
            descriptions.append(f"{name} {shorten(fields[name])} (base {theta:g})")
        raise UserError(
            f"config.json: {' and '.join(descriptions)} disagree; keep the one that the model was "
            "trained with"
        )
    return ropes[0]


def _rope_section(
    section: str,
    fields: Mapping[str, Any],
    max_position_embeddings: int,
    base: float,
) -> tuple[float, RopeScaling]:
    raw = dict(fields.get(section) or {})
    for name in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
        outside = fields.get(name)
        inside = raw.get(name)
        for value in (outside, inside):
            if name == "rope_theta" and value is not None:
                in_range(name, value)  # NaN would disagree with itself
        if None not in (outside, inside) and outside != inside:
            raise UserError(
                f"config.json: {name} is {shorten(outside)}, in {section} it is "
                f"{shorten(inside)}; keep the one that the model was trained with"
            )
        if outside is not None:
            raw[name] = outside
    theta = in_range("rope_theta", raw.pop("rope_theta", fields.get("rope_theta", base)))

    kind = raw.pop("rope_type", None)
    older = raw.pop("type", None)
    if None not in (kind, older) and kind != older:
        raise UserError(
            f"config.json: {section} has rope_type {shorten(kind)} and type {shorten(older)}; "
            "keep one"
        )
    if kind is None:
        kind = older
    if kind is None:
        kind = "default"
    if not isinstance(kind, str) or kind not in ("default", *_ROPE_FIELDS):
        supported = ", ".join(_ROPE_FIELDS)
        raise UserError(
            f"config.json: rope_type is {shorten(kind)}, supported are default, {supported}"
        )
    if raw.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UserError(
            "config.json: partial_rotary_factor other than 1 is not used by these families"
        )
    field_names = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    unknown = sorted(raw.keys() - field_names)
    if unknown:
        raise UserError(
            f"config.json: {section} has the unknown field {shorten(unknown[0])} for {kind!r}"
        )
    if kind == "default":
        return theta, RopeScaling()

    needed, optional = _ROPE_FIELDS[kind]
    # Fields of another kind, which transformers warns of and ignores, are ignored here too.
    values = {name: raw[name] for name in (*needed, *optional) if raw.get(name) is not None}
    if "original_max_position_embeddings" in needed:
        values.setdefault("original_max_position_embeddings", max_position_embeddings)
    for name in needed:
        if name not in values:
            raise UserError(f"config.json: {section} of type {kind!r} needs the field {name!r}")
    truncate = values.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"config.json: truncate is {shorten(truncate)}, must be true or false")
    numbers = {name: in_range(name, value) for name, value in values.items()}
    scaling = RopeScaling(kind, truncate=truncate, **numbers)
    if kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise UserError(
            f"config.json: low_freq_factor is {scaling.low_freq_factor:g}, must be below "
            f"high_freq_factor={scaling.high_freq_factor:g}"
        )
    return theta, scaling


def rope_fields(theta: float, scaling: RopeScaling, sliding_theta: float | None) -> dict[str, Any]:
    """The fields of config.json that `read_ropes` reads.

    Args:
        theta, scaling: base and scaling.
        sliding_theta: base of sliding layers; None where the family's have no rotary embedding of
            their own.
    """
    fields: dict[str, Any] = {}
    if scaling.kind != "default":
        needed, optional = _ROPE_FIELDS[scaling.kind]
        section = {"rope_type": scaling.kind}
        for name in (*needed, *optional):
            value = getattr(scaling, name)
            if name in needed or value != getattr(RopeScaling(), name):
                section[name] = value
        fields["rope_scaling"] = section
    if sliding_theta is not None:
        local = {"rope_type": "default", "rope_theta": sliding_theta}
        full = {"rope_theta": theta, **fields.get("rope_scaling", {"rope_type": "default"})}
        fields["rope_parameters"] = {SLIDING: local, FULL: full}
    return fields

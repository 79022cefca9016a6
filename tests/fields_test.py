"""Declaring settings: one field is all that a new one needs."""

import dataclasses
import typing

import pytest

from dcmdp_jax.algorithm import discrepancy, losses, stats
from dcmdp_jax.config.checks import validate
from dcmdp_jax.config.settings import Config
from dcmdp_jax.fields import (
    Setting,
    build,
    check_range,
    declared,
    flatten,
    parse_text,
    replace_value,
    setting,
)


@dataclasses.dataclass(frozen=True)
class _Inner:
    size: int = setting(3, "A size.", unit="rows", minimum=1, maximum=10)
    kind: str = setting("a", "A kind.", choices=("a", "b", "c"))


@dataclasses.dataclass(frozen=True)
class _Outer:
    rate: float = setting(0.5, "A rate.", free=True)
    inner: _Inner = _Inner()


def test_declarations_are_found_by_their_dotted_names():
    found = declared(_Outer)
    assert list(found) == ["rate", "inner.size", "inner.kind"]
    size = found["inner.size"]
    assert (size.type, size.default, size.bounds()) == (int, 3, (1, 10))
    assert size.about == Setting("A size.", unit="rows", minimum=1, maximum=10)
    assert found["rate"].about.free and not size.about.free
    assert found["rate"].bounds() == (1 - 2**31, 2**31 - 1)


def test_what_is_not_given_has_its_default():
    assert build(_Outer, {"inner": {"size": 4}}, KeyError) == _Outer(inner=_Inner(size=4))
    assert build(_Outer, {}, KeyError) == _Outer()
    with pytest.raises(KeyError, match=r"inner\.sze"):
        build(_Outer, {"inner": {"sze": 4}}, KeyError)


def test_a_value_is_replaced_by_its_dotted_name():
    values = {"inner": {"size": 4}}
    replace_value(values, "inner.size", 5)
    replace_value(values, "other.deep.name", 6)
    assert flatten(values) == {"inner.size": 5, "other.deep.name": 6}
    with pytest.raises(ValueError, match=r"^config\.inner\.size\.x: size is 5, must be a section$"):
        replace_value(values, "inner.size.x", 1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("rate", "1e-3", 0.001),
        ("rate", "2", 2.0),
        ("inner.size", "-4", -4),
        ("inner.kind", "1", "1"),
    ],
)
def test_text_becomes_a_value_of_the_type(name, text, value):
    made = parse_text(declared(_Outer)[name], text)
    assert made == value and type(made) is type(value)


def test_every_default_keeps_its_own_rules():
    config = Config()
    validate(dataclasses.replace(config, task=dataclasses.replace(config.task, train="x")))
    for one in declared(Config).values():
        assert type(one.default) is one.type or one.default == (), one.name
        assert one.about.doc.endswith((".", "...")), one.name
        check_range(one, one.default, one.name)


@pytest.mark.parametrize(
    ("name", "functions", "refused"),
    [
        ("algorithm.aggregation", losses.Aggregation, ()),
        ("algorithm.kl_estimator", stats.KlEstimator, ("k1",)),
        ("algorithm.measure", discrepancy.Measure, ()),
        ("algorithm.sided", discrepancy.Sided, ()),
        ("algorithm.level", discrepancy.PenaltyLevel, ()),
    ],
)
def test_the_choices_are_those_of_the_functions(name, functions, refused):
    assert sorted(declared(Config)[name].about.choices) == sorted(
        set(typing.get_args(functions)) - set(refused)
    )

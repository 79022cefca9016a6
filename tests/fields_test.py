"""Declaring settings: one field is all that a new one needs."""

import dataclasses
import typing

import pytest

from dcmdp_jax.algorithm import discrepancy, losses, stats
from dcmdp_jax.config.checks import validate
from dcmdp_jax.config.settings import Config
from dcmdp_jax.config.values import check_value
from dcmdp_jax.fields import Setting, declared, setting


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


def test_every_default_keeps_its_own_rules():
    config = Config()
    validate(dataclasses.replace(config, task=dataclasses.replace(config.task, train="x")))
    for one in declared(Config).values():
        assert type(one.default) is one.type or one.default == (), one.name
        assert one.about.doc.endswith((".", "...")), one.name
        check_value(one, one.default, one.name)


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

"""Values of settings get the type, and the range, of their declaration."""

import dataclasses

import pytest

from dcmdp_jax.config.values import build, parse_text
from dcmdp_jax.fields import declared, setting


@dataclasses.dataclass(frozen=True)
class _Inner:
    size: int = setting(3, "A size.", unit="rows", minimum=1, maximum=10)
    kind: str = setting("a", "A kind.", choices=("a", "b", "c"))


@dataclasses.dataclass(frozen=True)
class _Outer:
    rate: float = setting(0.5, "A rate.", free=True)
    inner: _Inner = _Inner()


def test_what_is_not_given_has_its_default():
    assert build(_Outer, {"inner": {"size": 4}}, KeyError) == _Outer(inner=_Inner(size=4))
    assert build(_Outer, {}, KeyError) == _Outer()
    with pytest.raises(KeyError, match=r"inner\.sze"):
        build(_Outer, {"inner": {"sze": 4}}, KeyError)


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

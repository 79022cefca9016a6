"""The syntax of functions that settings name."""

import functools

import pytest

from dcmdp_jax.algorithm.corrections import CORRECTIONS
from dcmdp_jax.algorithm.remedies import check_terms
from dcmdp_jax.config.algorithm import _REMEDIES, AlgorithmSettings
from dcmdp_jax.errors import UserError
from dcmdp_jax.named_functions import Call, check_call, parse_calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", []),
        ("tis", [Call("tis", {})]),
        (
            " tis ( low=0.5 , high=2 ) , veto,",
            [Call("tis", {"low": 0.5, "high": 2.0}), Call("veto", {})],
        ),
        (
            "f(kind=k2,high=inf)",
            [Call("f", {"kind": "k2", "high": float("inf")})],
        ),  # inf is a number, k2 a word
        ("f(kind=a,n=1),f(kind=b,n=1)", [Call("f", {"kind": kind, "n": 1.0}) for kind in "ab"]),
        ("a/b.py:f(k=1e-3)", [Call("a/b.py:f", {"k": 0.001})]),
        ("my files/b.py:f,tis", [Call("my files/b.py:f", {}), Call("tis", {})]),
        (
            "package.module:f(on=true,off=false)",
            [Call("package.module:f", {"on": True, "off": False})],
        ),
    ],
)
def test_text_becomes_calls(text, calls):
    assert parse_calls(text) == calls
    assert parse_calls(",".join(map(str, calls))) == calls  # what is written again reads the same


def test_a_users_function_is_known_by_its_colon():
    assert [call.own for call in parse_calls("tis,a.py:f,m:g")] == [False, True, True]
    assert [call.name for call in parse_calls("tis,a.py:f,m:g")] == ["tis", "f", "g"]


@pytest.mark.parametrize(
    "text",
    [
        "tis veto",
        "tis(high=2",
        "tis)",
        ",",
        "tis(2)",
        "tis(high=\u0662)",
        "tis,a.py:tis",
        "f(k=a),f(k=a,n=1)",
    ],
)
def test_other_text_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match="^got ") as raised:
        parse_calls(text)
    assert "\n" not in str(raised.value)


_OURS = [(setting, name) for setting, (_, built_in) in _REMEDIES.items() for name in built_in]


@pytest.mark.parametrize("positional", ["2", "2,3", "high=2,5", "=2", "high=2,high=3", "size= "])
@pytest.mark.parametrize(("setting", "name"), _OURS, ids=[name for _, name in _OURS])
def test_the_advice_of_a_refusal_is_accepted(setting, name, positional):
    """The refusal of `tis(2)` says what to write for this very function: the checks take it."""
    with pytest.raises(UserError) as refused:
        AlgorithmSettings(**{setting: f"{name}({positional})"}).calls(setting)
    advice = str(refused.value).partition("each once, as in ")[2]
    (call,) = parse_calls(advice)
    assert call.function == name
    built_in = _REMEDIES[setting][1]
    check_call(call, built_in)
    if setting != "loss":  # its trust region is bound later
        check_terms(_REMEDIES[setting][0], functools.partial(built_in[name], **call.parameters))


def test_a_missing_parameter_and_a_users_function_are_advised_of_what_they_take():
    with pytest.raises(
        UserError,
        match=r"^kl_rejection needs high, such as kl_rejection\(high=0\.1,estimator=k3,over",
    ):
        check_call(Call("kl_rejection", {}), CORRECTIONS)
    with pytest.raises(
        UserError, match=r"^got a\.py:f\('2'\); parameters are name=number .*, each once$"
    ):
        parse_calls("a.py:f(2)")

"""Engines by name, and engines that can't be compared."""

import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.probe.live.engines import ProbeSpec, check_same_tokens, parse_spec
from dcmdp_jax.probe.live.session import check_specs


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer", ProbeSpec(kind="trainer", precision="float32", compute="float32")),
        ("trainer:bfloat16", ProbeSpec(kind="trainer", precision="bfloat16", compute="bfloat16")),
        ("local:fp8", ProbeSpec(kind="local", precision="fp8", compute="float32")),
        (
            "local:int8,compute=bfloat16",
            ProbeSpec(kind="local", precision="int8", compute="bfloat16"),
        ),
        (
            "vllm:bfloat16,cache=fp8",
            ProbeSpec(kind="vllm", precision="bfloat16", compute="bfloat16", cache="fp8"),
        ),
        (
            "vllm:fp8_per_block",
            ProbeSpec(kind="vllm", precision="fp8_per_block", compute="bfloat16"),
        ),
        (
            "local:exact,model=a/b",
            ProbeSpec(
                kind="local", precision="exact", compute="float32", cache="auto", model="a/b"
            ),
        ),
        ("hf", ProbeSpec(kind="hf", precision="float32", compute="float32")),
        (
            "tests/engines/stub_engine.py:ENGINE",
            ProbeSpec(
                kind="tests/engines/stub_engine.py:ENGINE", precision="float32", compute="float32"
            ),
        ),
        (
            "tests.engines.stub_engine:ENGINE:float32,model=a/b",
            ProbeSpec(
                kind="tests.engines.stub_engine:ENGINE",
                precision="float32",
                compute="float32",
                cache="auto",
                model="a/b",
            ),
        ),
    ],
)
def test_a_name_says_which_engine(text, expected):
    assert parse_spec(text) == expected
    assert parse_spec(str(expected)) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torch", "engine 'torch': engine 'torch', allowed are trainer, hf, local, vllm, http"),
        ("tests/engines/stub_engine.py:ENGINE:fp8", "precision 'fp8', allowed are float32"),
        ("tests/engines/stub_engine.py:MISSING", "stub_engine.py has no object 'MISSING'; it has"),
        ("local:fp4", "precision 'fp4', allowed are exact, float32"),
        ("vllm:bfloat16,cache=int4", "cache 'int4', allowed are auto, fp8"),
        ("trainer,cache=fp8", "option 'cache', allowed are model"),
        ("local:fp8,color=red", "option 'color', allowed are compute, cache, model"),
    ],
)
def test_what_is_no_engine_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        parse_spec(text)


def test_the_order_of_options_does_not_count():
    # `cache` of the trainer is allowed by `like`, wherever that stands.
    spec = parse_spec("trainer,like=vllm:int8,cache=fp8")
    assert parse_spec("trainer,cache=fp8,like=vllm:int8") == spec
    assert (spec.like, spec.cache) == ("vllm:int8", "fp8")


def test_an_engine_that_only_scores_cannot_sample():
    with pytest.raises(
        UserError, match="--a: hf:float32 only scores; engines that sample are local, vllm"
    ):
        check_specs([parse_spec("hf")], parse_spec("trainer"))


def test_two_vocabularies_that_differ_are_refused_in_one_line():
    first = {"a": 0, "b": 1, "c": 2}
    second = {"a": 0, "c": 1}
    check_same_tokens(first, dict(first), ("x", "y"))
    with pytest.raises(
        UserError, match="differ in 2 tokens: token 1 is 'b' for x and 'c' for y; log-probs"
    ) as raised:
        check_same_tokens(first, second, ("x", "y"))
    assert "\n" not in str(raised.value)

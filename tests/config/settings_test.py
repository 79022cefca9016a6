"""Every rule of `config/settings.py`, with the line a person gets for breaking it."""

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from configs.base import get_config
from dcmdp_jax.config.load import from_config_dict, from_saved, to_saved, unknown_setting
from dcmdp_jax.config.rollout import TRAINABLE
from dcmdp_jax.config.settings import Config, setting_names, to_dict
from dcmdp_jax.errors import UserError, shorten
from dcmdp_jax.fields import declared
from tests.support.refusals import refused


def _values():
    values = get_config().to_dict()
    values["task"]["train"] = "train.jsonl"
    return values


def _with(**changes):
    """`section__name=value` changes of a valid config."""
    values = _values()
    for dotted, value in changes.items():
        *sections, name = dotted.split("__")
        place = values
        for section in sections:
            place = place[section]
        place[name] = value
    return values


def _error(**changes):
    line = refused(from_config_dict, _with(**changes))
    assert "\n" not in line and line.startswith("config.")
    return line.removeprefix("config.")


_DECLARED = declared(Config)
_TYPES = {name: one.type for name, one in _DECLARED.items()}
_CHOICES = {name: one.about.choices for name, one in _DECLARED.items() if one.about.choices}
_LOW = {
    name: one.about.minimum
    for name, one in _DECLARED.items()
    if one.about.minimum is not None and one.type in (int, float)
}


ENGINE_CHOICES = {
    engine: {f"rollout.{name}": allowed for name, allowed in kind.choices.items()}
    for engine, kind in TRAINABLE.items()
}
_OF_ANY_ENGINE = {
    name: {one for each in ENGINE_CHOICES.values() for one in each[name]}
    for name in ENGINE_CHOICES["local"]
}


def _set(dotted, value):
    return {dotted.replace(".", "__"): value}


def test_the_defaults_are_valid_once_they_name_a_task():
    config = from_config_dict(_with())
    assert config.mini_batches == 4  # 64 / 16
    assert config.completions_per_mini_batch == 128  # 16 * 8
    assert config.max_total_tokens == 9216  # 1024 + 8192
    assert _error(task__train="").startswith("task.train: empty; name a .jsonl or .parquet file")


def test_a_config_dict_and_a_plain_dict_make_the_same():
    assert from_config_dict(ConfigDict(_values())) == from_config_dict(_values())


def test_the_written_form_makes_the_same_config_again():
    config = from_config_dict(_with(training__row_lengths=(64, 16384), algorithm__multiplier=0))
    written = json.loads(json.dumps(to_dict(config), allow_nan=False))
    assert (
        written["training"]["row_lengths"] == [64, 16384]
        and written["algorithm"]["multiplier"] == 0.0
    )
    assert from_config_dict(written) == config


def test_every_setting_is_in_the_defaults_and_the_other_way_round():
    def flat(values, prefix=""):
        for name, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    assert sorted(flat(_values())) == sorted(setting_names()) == sorted(_TYPES)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("algorithm.multplier", "algorithm.multiplier"),
        ("algorithm.tolerence", "algorithm.tolerance"),
        ("rollout.groupsize", "rollout.group_size"),
        ("training.group_size", "rollout.group_size"),  # the right name in the wrong section
        ("optimiser", "optimizer"),
        ("rollout.vlm", "rollout.vllm"),
        ("rundir", "run_dir"),
        ("multiplier", "algorithm.multiplier"),
    ],
)
def test_an_unknown_name_gets_the_nearest_right_one(name, nearest):
    assert (
        str(unknown_setting(name)) == f"config.{name}: no such setting; did you mean {nearest!r}?"
    )


def test_a_name_like_no_other_gets_the_sections():
    line = str(unknown_setting("qqq"))
    assert line.startswith(
        "config.qqq: no such setting; sections are run_dir, model, task, rewards, rollout, "
        "algorithm"
    )


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("rollout.foo", "rollout"),  # not 'rollout'
        ("rollout.local.foo", "rollout.local"),  # not 'rollout.local.tensor'
        ("rewards.bar", "rewards"),
    ],
)
def test_a_name_like_none_of_its_section_gets_no_other_name(name, section):
    assert str(unknown_setting(name)) == (
        f"config.{name}: no such setting; `dcmdp settings {section}` lists those of the section"
    )


def test_an_unknown_name_in_a_section_is_refused():
    assert _error(algorithm__multplier=0.1) == (
        "algorithm.multplier: no such setting; did you mean 'algorithm.multiplier'?"
    )
    assert _error(extra=1).startswith("extra: no such setting")


def test_a_missing_setting_has_its_default():
    assert from_config_dict({"task": {"train": "train.jsonl"}}) == from_config_dict(_values())


def test_a_section_that_is_none_is_named():
    assert _error(optimizer=3) == "optimizer: got 3, must be a section with named settings"


_WRONG = {
    int: st.one_of(
        st.booleans(),
        st.text(),
        st.none(),
        st.just(1.5),
        st.lists(st.integers()),
        st.just(float("nan")),
    ),
    float: st.one_of(st.booleans(), st.text(), st.none(), st.lists(st.floats())),
    str: st.one_of(st.booleans(), st.integers(), st.floats(), st.none(), st.lists(st.text())),
    bool: st.one_of(st.integers(), st.floats(), st.text(), st.none()),
    tuple[int, ...]: st.one_of(
        st.text(), st.none(), st.lists(st.floats(), min_size=1), st.lists(st.booleans(), min_size=1)
    ),
    tuple[float, ...]: st.one_of(
        st.floats(),
        st.text(),
        st.none(),
        st.lists(st.text(), min_size=1),
        st.lists(st.booleans(), min_size=1),
    ),
}


@given(st.data())
def test_a_value_of_a_wrong_type_is_refused_by_name(data):
    name = data.draw(st.sampled_from(sorted(_TYPES)))
    value = data.draw(_WRONG[_TYPES[name]])
    line = _error(**_set(name, value))
    assert line.startswith(f"{name}: got {shorten(value)}")
    kinds = ("int", "float", "str", "bool", "a tuple of int", "a tuple of float")
    assert line.endswith(tuple(f"must be {kind}" for kind in kinds))


@given(
    st.sampled_from(sorted(name for name, hint in _TYPES.items() if hint is float)),
    st.integers(0, 1),
)
def test_an_integer_is_taken_for_a_float_and_becomes_one(name, value):
    try:
        config = from_config_dict(_with(**_set(name, value)))
    except ValueError as error:
        assert "must be float" not in str(error)  # a rule about the value, not about its type
        return
    made = functools.reduce(getattr, name.split("."), config)
    assert type(made) is float and made == value


def test_one_integer_is_taken_for_a_tuple_of_one():
    """As `evaluation.samples` was written before it had a number for each task."""
    assert from_config_dict(_with(evaluation__samples=3)).evaluation.samples == (3,)


def test_a_whole_float_is_taken_for_an_integer():
    steps = from_config_dict(_with(training__steps=1e3)).training.steps
    assert type(steps) is int and steps == 1000


def test_a_choice_outside_the_list_is_refused_with_the_list():
    for name, allowed in _CHOICES.items():
        line = _error(**_set(name, wrong := allowed[-1] + "x"))
        assert line.startswith(f"{name}: got {wrong!r}, allowed are {', '.join(allowed)}")
        assert line.endswith(f"did you mean {allowed[-1]!r}?")


# Choices that engines share, and of vLLM alone.
_ELSEWHERE = ("auto", "fp8_per_block", "fp8_e5m2")


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        (name, one.upper(), one)
        for name, each in (_CHOICES | _OF_ANY_ENGINE).items()
        for one in sorted(each)
        if one not in _ELSEWHERE
    ]
    + [
        ("rewards.functions", wrong, one)
        for wrong, one in (("math-verify", "math_verify"), ("MATH", "math"))
    ]
    + [
        ("rewards.functions", wrong, "last_number")
        for wrong in ("last-number", "lastnumber", "last")
    ]
    + [("rollout.engine", wrong, "vllm") for wrong in ("vLLM", "vlm")]
    + [("rollout.engine", "Local", "local")],
)
def test_a_choice_in_another_spelling_is_told_the_right_one(name, value, nearest):
    assert _error(**_set(name, value)).endswith(f"; did you mean {nearest!r}?")


@pytest.mark.parametrize("name", ["sglang", "http", "openai"])
def test_a_server_is_said_to_be_for_measuring_alone(name):
    assert _error(rollout__engine=name) == (
        f"rollout.engine: got {name!r}, allowed are local, vllm, module:NAME and path.py:NAME; "
        "http, a server of yours, is for `dcmdp probe` and `dcmdp evaluate` alone"
    )


def test_every_choice_is_allowed():
    """With the engine that has it; vLLM wants one dtype for weights and activations, a matched
    forward its engine.
    """
    for name, choice in [
        (name, one) for name, each in (_CHOICES | _OF_ANY_ENGINE).items() for one in each
    ]:
        settings = _set(name, choice)
        own = {
            "model.forward_precision": "rollout.precision",
            "model.forward_cache": "rollout.kv_cache_dtype",
        }.get(name)
        if own and choice != "full":
            settings |= _set(own, choice)
        if choice not in ("full", *ENGINE_CHOICES["local"].get(own or name, (choice,))):
            settings = _set("rollout.engine", "vllm") | settings
        from_config_dict(_with(**settings))


@pytest.mark.parametrize("engine", sorted(ENGINE_CHOICES))
def test_an_engine_refuses_what_only_the_other_has(engine):
    for name, allowed in ENGINE_CHOICES[engine].items():
        for choice in {"other", *_OF_ANY_ENGINE[name]} - set(allowed):
            with pytest.raises(
                ValueError,
                match=f"{name}: got '{choice}', allowed with rollout.engine={engine} are",
            ):
                from_config_dict(_with(**_set("rollout.engine", engine), **_set(name, choice)))


def test_a_value_past_either_end_is_refused_with_the_bounds():
    for name, low in _LOW.items():
        high = _DECLARED[name].about.maximum
        step = 1 if _TYPES[name] is int else 1e-3
        assert _error(**_set(name, low - step)).startswith(
            f"{name}: got {low - step}, must be at least {low}"
        )
        if high is not None:
            assert (
                _error(**_set(name, high + step))
                == f"{name}: got {high + step}, must be at most {high}"
            )


@pytest.mark.parametrize(("name", "value"), [("optimizer.epsilon", 0.0)])
def test_what_would_break_late_is_refused_at_once(name, value):
    # 0 / 0 in Adam for a gradient of 0.
    assert _error(**_set(name, value)).startswith(f"{name}: got {value}, must be")


@pytest.mark.parametrize(
    ("name", "lowest"),
    [
        ("rollout.group_size", 2),
        ("training.steps", 1),
        ("training.seed", 0),
        ("algorithm.tolerance", 0.0),
        ("evaluation.every_steps", 0),
        ("evaluation.temperature", 0.0),
        ("checkpoint.keep_best", 0),
        ("optimizer.max_grad_norm", 0.0),
        ("task.verifier_timeout", 0.01),
    ],
)
def test_the_lowest_value_is_itself_allowed(name, lowest):
    from_config_dict(_with(**_set(name, lowest)))


def test_the_longest_row_may_hold_the_longest_sequence_exactly():
    assert from_config_dict(_with(training__row_lengths=(64, 9216))).training.row_lengths == (
        64,
        9216,
    )


def test_a_number_is_finite():
    for name in [name for name, hint in _TYPES.items() if hint is float]:
        for value in (float("inf"), float("-inf"), float("nan")):
            assert _error(**_set(name, value)) == f"{name}: got {value!r}, must be a finite number"
    for value, shown in ((10**400, "inf"), (-(10**400), "-inf")):
        line = _error(algorithm__tolerance=value)
        assert line == f"algorithm.tolerance: got {shown}, must be a finite number"


def test_no_number_may_be_as_large_as_one_likes():
    largest = {int: 10**40, float: 1e300}
    for name, size in [(name, largest[hint]) for name, hint in _TYPES.items() if hint in largest]:
        for value in (size, -size):
            said = (f"{name}: got {value}, ", "mesh: got", "algorithm.multiplier: got")
            assert _error(**_set(name, value)).startswith(said)


def test_a_model_that_is_read_from_a_directory_needs_no_architecture_that_fits():
    huge = {
        f"model__architecture__{name}": 2**31 - 1
        for name in ("hidden_size", "intermediate_size", "num_layers")
    }
    from_config_dict(_with(model__path="x", **huge))


def test_the_papers_30b_run_fits_many_times_over():
    from_config_dict(
        _with(
            training__prompts_per_step=1024,
            rollout__group_size=64,
            rollout__max_completion_tokens=30720,
        )
    )


def test_k1_is_refused_as_a_loss_with_the_reason():
    said = "algorithm.kl_estimator: got 'k1', allowed are k2, k3 (the expected gradient of k1 is 0)"
    assert _error(algorithm__kl_estimator="k1", algorithm__kl_coefficient=0.1) == said


def test_what_a_run_saves_says_every_number_of_its_method():
    # The paper's 0.24 would else stand in a Python default alone, and a later default would change
    # what a run did.
    remedies = {
        "algorithm__trust_region": "clip(low=0.2,high=0.24)",
        "algorithm__corrections": "tis(high=2),veto",
    }
    config = from_config_dict(_with(**remedies))
    saved = to_saved(config)
    assert saved["algorithm"]["trust_region"] == "clip(low=0.2,high=0.24,dual=0.0)"
    assert saved["algorithm"]["corrections"] == "tis(low=0.0,high=2.0),veto(floor=0.0001)"
    assert (
        from_saved(saved)
        == config
        == from_config_dict(_with(**remedies | {"algorithm__trust_region": "clip"}))
    )


@pytest.mark.parametrize("port", ["0", "65536", "-1", "x", ""])
def test_every_setting_with_an_address_refuses_a_port_that_does_not_exist(port):
    addresses = {
        "hosts.coordinator": f"host:{port}",
        "rollout.vllm.address": f"ray://host:{port}",
        "rewards.functions": f"teacher:http://host:{port}/v1",
    }
    ray = {"rollout__engine": "vllm", "rollout__vllm__placement": "ray", "hosts__processes": 2}
    for name, address in addresses.items():
        line = _error(**ray | _set(name, address))
        assert line.startswith(f"{name}: got ") and "1 to 65535" in line


@pytest.mark.parametrize(
    ("file", "overrides", "line"),
    [
        # The multiplier is 0.1 unless it is set, its upper end 1.
        (
            {},
            {"multiplier_max": 0.05},
            "multiplier_max: got 0.05, is below algorithm.multiplier=0.1: raise it, or lower "
            "algorithm.multiplier",
        ),
        (
            {},
            {"multiplier": 1.5},
            "multiplier: got 1.5; algorithm.multiplier_max=1.0: is below algorithm.multiplier=1.5",
        ),
        (
            {"multiplier": 0.5},
            {"multiplier_max": 0.4},
            "multiplier_max: got 0.4, is below algorithm.multiplier=0.5: raise it, or lower",
        ),
        (
            {"multiplier_max": 0.4},
            {"multiplier": 0.5},
            "multiplier: got 0.5; algorithm.multiplier_max=0.4: is below algorithm.multiplier=0.5",
        ),
        (
            {"multiplier_max": 0.05},
            {},
            "multiplier_max: got 0.05, is below algorithm.multiplier=0.1: raise it, or lower "
            "algorithm.multiplier",
        ),
        (
            {},
            {"multiplier": 3, "multiplier_max": 2},
            "multiplier_max: got 2.0, is below algorithm.multiplier=3.0: raise it, or lower",
        ),
        ({}, {"multiplier": -0.5}, "multiplier: got -0.5, must be at least 0"),
    ],
)
def test_of_two_settings_that_do_not_fit_the_one_that_was_changed_is_blamed(file, overrides, line):
    changed = {f"algorithm__{name}": value for name, value in (file | overrides).items()}
    with pytest.raises(UserError) as error:
        from_config_dict(
            _with(**changed), {f"algorithm.{name}": value for name, value in overrides.items()}
        )
    assert str(error.value).startswith(f"config.algorithm.{line}")


def test_a_rule_of_other_settings_blames_the_override_too():
    with pytest.raises(UserError) as error:
        from_config_dict(_with(training__prompts_per_step=100), {"training.prompts_per_step": 100})
    said = "training.prompts_per_mini_batch=16: must divide training.prompts_per_step=100"
    assert str(error.value) == f"config.training.prompts_per_step: got 100; {said}"

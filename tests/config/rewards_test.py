"""Settings of the rewards: names and weights are checked before anything is imported."""

from dcmdp_jax.config.load import from_config_dict, parse_value


def _rewards(**changes):
    return from_config_dict({"task": {"train": "train.jsonl"}, "rewards": changes}).rewards


def test_each_function_has_weight_one_by_default():
    assert _rewards().weighted == (("math", 1.0),)
    assert _rewards(functions="math, a.b:f,x/y.py:g").weighted == (
        ("math", 1.0),
        ("a.b:f", 1.0),
        ("x/y.py:g", 1.0),
    )


def test_weights_belong_to_the_functions_in_order():
    weights = parse_value("rewards.weights", "1,-0.25")
    assert _rewards(functions="math,a:f", weights=weights).weighted == (
        ("math", 1.0),
        ("a:f", -0.25),
    )

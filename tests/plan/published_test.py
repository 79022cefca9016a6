"""Every config at full size: its model has the published number of parameters, and its mesh divides it."""

import importlib
import logging
import math

import jax
import pytest

from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.hf_config import from_hf
from dcmdp_jax.models.params import init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import param_shardings
from dcmdp_jax.plan.published import PUBLISHED, model_of
from tests.support.our_log import our_log

# Of the model cards, and of transformers' own modules on the meta device.
_PARAMETERS = {
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "r1_distill_qwen_1p5b": 1_777_088_000,
}


def _config(name, **changes):
    config = importlib.import_module(f"configs.{name}").get_config()
    for key, value in changes.items():
        section, field = key.split("__")
        setattr(config[section], field, value)
    return from_config_dict(config)


@pytest.mark.parametrize(("name", "parameters"), _PARAMETERS.items())
def test_the_number_of_parameters_is_the_published_one(name, parameters):
    model = model_of(_config(name))
    shapes = jax.eval_shape(lambda: init_params(model, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == num_params(model) == parameters


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("qwen3_8b", (1, 8, 1, 1)),
        ("qwen3_8b", (1, 2, 4, 1)),
        ("r1_distill_qwen_1p5b", (2, 4, 1, 1)),
        ("qwen3_30b_a3b", (1, 1, 1, 8)),
        ("qwen3_30b_a3b", (1, 2, 2, 2)),
    ],
)
def test_every_axis_divides(name, mesh, caplog):
    model = model_of(_config(name))
    with caplog.at_level(logging.WARNING):
        param_shardings(logical_axes(model), param_shapes(model), make_mesh(*mesh, devices=jax.devices()[:8]))
    assert our_log(caplog) == []


@pytest.mark.parametrize(("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-1.7B", 1_720_574_976)])
def test_small_published_models_have_their_parameters(name, parameters):
    assert num_params(from_hf(PUBLISHED[name])) == parameters


def test_a_model_that_nobody_knows():
    with pytest.raises(UserError) as raised:
        model_of(_config("qwen3_8b", model__path="models/Qwen9-8B"))
    assert str(raised.value) == (
        "config.model.path: no directory models/Qwen9-8B, and no published shape of that name; known are "
        "Qwen3-0.6B, Qwen3-1.7B, Qwen3-8B, Qwen3-30B-A3B, Qwen3.5-0.8B, DeepSeek-R1-Distill-Qwen-1.5B, "
        "Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.1, SmolLM3-3B, Olmo-3-7B-Instruct, gemma-3-270m-it, "
        "gemma-3-1b-it"
    )

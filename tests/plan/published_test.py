"""Every config at full size: its model has the published number of parameters, and its mesh divides
it.
"""

import importlib
import json
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
    assert (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
        == num_params(model)
        == parameters
    )


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
        param_shardings(
            logical_axes(model), param_shapes(model), make_mesh(*mesh, devices=jax.devices()[:8])
        )
    assert our_log(caplog) == []


@pytest.mark.parametrize(
    ("name", "parameters"), [("Qwen3-0.6B", 596_049_920), ("Qwen3-1.7B", 1_720_574_976)]
)
def test_small_published_models_have_their_parameters(name, parameters):
    assert num_params(from_hf(PUBLISHED[name])) == parameters


def test_a_model_that_nobody_knows():
    with pytest.raises(UserError) as raised:
        model_of(_config("qwen3_8b", model__path="models/Qwen9-8B"))
    assert str(raised.value) == (
        (
            "config.model.path: no directory models/Qwen9-8B, and no published shape of that name; "
            "known are Qwen3-0.6B, Qwen3-1.7B, Qwen3-8B, Qwen3-30B-A3B, Qwen3.5-0.8B, "
            "DeepSeek-R1-Distill-Qwen-1.5B, Llama-3.1-8B-Instruct, Mistral-7B-Instruct-v0.1, "
            "SmolLM3-3B, Olmo-3-7B-Instruct, gemma-3-270m-it, gemma-3-1b-it, "
        )
        + ", ".join(
            f"Qwen2.5-{name}"
            for name in (
                "0.5B, Qwen2.5-0.5B-Instruct, Qwen2.5-Coder-0.5B",
                "1.5B, Qwen2.5-1.5B-Instruct, Qwen2.5-Coder-1.5B, Qwen2.5-Math-1.5B",
                "3B, Qwen2.5-3B-Instruct, Qwen2.5-Coder-3B",
                "7B, Qwen2.5-7B-Instruct, Qwen2.5-Coder-7B, Qwen2.5-Math-7B",
                "14B, Qwen2.5-14B-Instruct, Qwen2.5-Coder-14B",
                "32B, Qwen2.5-32B-Instruct, Qwen2.5-Coder-32B",
                "72B, Qwen2.5-72B-Instruct, Qwen2.5-Math-72B",
            )
        )
        + "; did you mean 'Qwen3-8B'?"
    )


def test_a_package_s_model_is_planned_from_its_converted_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = _config("qwen3_8b", model__path="pip:some-model")
    with pytest.raises(UserError, match="no directory models/some-model; .* --dry-run` converts"):
        model_of(config)
    (tmp_path / "models" / "some-model").mkdir(parents=True)
    fields = json.dumps(PUBLISHED["Qwen3-0.6B"])
    (tmp_path / "models" / "some-model" / "config.json").write_text(fields)
    assert num_params(model_of(config)) == 596_049_920


# Numbers of parameters in the published files.
_QWEN25 = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
    "72B": 72_706_203_648,
}


@pytest.mark.parametrize(("size", "parameters"), _QWEN25.items())
def test_qwen25_has_its_published_parameters_context_and_rotary_base(size, parameters):
    for kind, context, base in (
        ("Qwen2.5-", 131072 if size not in ("0.5B", "3B") else 32768, 1e6),
        ("Qwen2.5-Coder-", 32768, 1e6),
        ("Qwen2.5-Math-", 4096, 1e4),
    ):
        if f"{kind}{size}" not in PUBLISHED:
            assert (kind, size) == ("Qwen2.5-Coder-", "72B") or kind == "Qwen2.5-Math-"
            continue
        for suffix in ("", "-Instruct"):
            model = model_of(_config("qwen3_8b", model__path=f"Qwen/{kind}{size}{suffix}@main"))
            assert (
                num_params(model) == parameters
                and model.attention_bias
                and model.rope_theta == base
            )
            assert model.head_dim == (64 if size == "0.5B" else 128)
            instructed = kind == "Qwen2.5-" and suffix
            assert model.max_position_embeddings == (32768 if instructed else context)

"""Precision of the products in the programs of a run, as the compiler gets them."""

import re

import jax

from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.run_plan import plan_engine, plan_step, planned_run


def _products(dtype, *, head="compute"):
    """Program -> (dtype of the first operand, whether it asks for full precision) of its
    products.
    """
    config = qwen3_8b.get_config("local,debug")
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = dtype
    config.model.attention, config.model.head_dtype = "xla", head
    config = from_config_dict(config)
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    run = planned_run(config, mesh)
    programs = [plan_step(run), *plan_engine(run, 8).programs]
    found = {}
    for program in programs:
        lines = re.findall(r"stablehlo\.dot_general[^\n]*", program.trace().lower().as_text())
        found[program.name] = [
            (re.search(r"tensor<[\dx]*?([a-wyz]+\d+)>", line)[1], "HIGHEST" in line)
            for line in lines
        ]
    return found


def test_float32_is_computed_in_float32():
    """A GPU's own way with float32 is TensorFloat-32, a TPU's bfloat16; with it p_train is no
    float32 number.
    """
    programs = _products("float32")
    assert set(programs) == {"step", "prefill", "decode", "score"}
    for name, products in programs.items():
        assert set(products) == {("f32", True)}, name
    # Forward, backward and recomputation of attention, MLP and head, and the norm of 14 leaves.
    assert len(programs["step"]) > 40


def test_half_precision_is_left_alone():
    """Kernels for TPUs refuse another precision for bfloat16. The gradient's norm is a float32
    product there too.
    """
    programs = _products("bfloat16")
    assert set(programs["step"]) == {("bf16", False), ("f32", True)}
    for name in ("prefill", "decode", "score"):
        assert set(programs[name]) == {("bf16", False)}, name


def test_a_float32_head_is_one():
    few, more = (_products("bfloat16", head=head)["step"] for head in ("compute", "float32"))
    assert more.count(("f32", True)) > few.count(("f32", True))
    assert ("f32", False) not in more

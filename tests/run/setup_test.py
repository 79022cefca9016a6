"""Shapes that a config is computed in."""

import dataclasses
import math
import re
from unittest import mock

import jax
import pytest

from configs import demo, demo_moe, qwen3_8b
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.engines.machine import Machine
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run import description, placement
from dcmdp_jax.run import directory as run_directory
from dcmdp_jax.run.description import describe
from dcmdp_jax.run.run import Run
from tests.support.memory_plans import bytes_of


def _plan(tmp_path, shape=(1, 1, 1), source=demo, **changes):
    mesh = make_mesh(*shape, devices=jax.devices()[: math.prod(shape)])
    config = source.get_config()
    config.run_dir, config.warmup.steps, config.evaluation.every_steps = str(tmp_path / "run"), 0, 0
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(config[section], field, value)
    with mock.patch.object(placement, "training_mesh", lambda *sizes, num_params: mesh):
        return Run.check(from_config_dict(config))


def _packing(tmp_path, shape=(1, 1, 1), **changes):
    """The shapes on a mesh of that shape; and what people are told."""
    plan = _plan(tmp_path, shape, **changes)
    return plan.placement.packing, describe(plan)


def test_a_run_whose_lambda_never_moves_says_so(tmp_path):
    settings = {"algorithm__tolerance_steps": 4, "rollout__precision": "float32"}
    _, told = _packing(tmp_path, training__steps=4, **settings)
    line = "algorithm.tolerance_steps=4 is not below training.steps=4: lambda stays at lambda_0"
    assert re.search(rf"^warning +{line} throughout$", told, re.MULTILINE)
    assert "warning" not in _packing(tmp_path, training__steps=5, **settings)[1]


def test_rows_are_told(tmp_path):
    # 24 prompts x 8 in a mini-batch, prompts of 20 tokens and completions of 36.
    packing, told = _packing(
        tmp_path, training__row_lengths=(56,), training__micro_batch_tokens=16384
    )
    assert (packing.row_lengths, packing.rows_per_micro_batch, packing.micro_batches) == (
        (56,),
        (192,),
        (1,),
    )
    assert re.search(
        r"^rows +micro-batches of 192 x 56 tokens, each shape compiled; \d+% padding expected of "
        r"completions with a median of 9 tokens$",
        told,
        re.MULTILINE,
    )


@pytest.mark.parametrize(
    ("kernel", "most"), [("xla", 1), ("cudnn", 16), ("blockwise", 2**31 - 1), ("splash", 2**31 - 1)]
)
def test_rows_are_long_where_the_kernel_skips_other_segments(kernel, most):
    """On a GPU too: cuDNN takes each segment as a sequence of its own, and keeps memory for each of
    them.
    """
    config = from_config_dict(qwen3_8b.get_config())
    mesh = make_mesh(devices=jax.devices()[:1])
    shapes = placement.packing_on(config, mesh, Compute(attention=kernel))
    assert shapes.segments_per_row == most and (len(shapes.row_lengths) > 3) == (kernel == "xla")
    given = dataclasses.replace(
        config, training=dataclasses.replace(config.training, segments_per_row=3)
    )
    assert placement.packing_on(given, mesh, Compute(attention=kernel)).segments_per_row == 3


def test_the_threads_of_a_model_above_two_million_parameters_share_a_heap(tmp_path, monkeypatch):
    shared = []
    monkeypatch.setattr(placement, "share_heap", lambda: shared.append(True))
    _plan(tmp_path)
    assert shared == []
    # Four layers of 4 * 512 * 512 or more: above 4 million.
    wide = demo.get_config().model.architecture.to_dict() | {"hidden_size": 512, "num_layers": 4}
    wide |= {"intermediate_size": 512, "num_heads": 16, "num_kv_heads": 16}
    _plan(tmp_path, model__architecture=wide)
    assert shared == [True]


def test_a_prompt_suffix_is_in_the_plan(tmp_path):
    _, told = _packing(tmp_path, task__prompt_suffix=" Go.\n", task__max_prompt_tokens=30)
    assert re.search(r"^suffix +' Go.\\n' after each problem$", told, re.MULTILINE)
    _, told = _packing(tmp_path, task__prompt_suffix="")
    assert re.search(r"^suffix ", told, re.MULTILINE) is None


@pytest.mark.parametrize(
    "content", ["", '{"step": 1, "time/over', "damaged\n{}\n", '{"step": 1, "time/overlap": "x"}\n']
)
def test_metrics_that_cannot_be_read_do_not_stop_a_lagged_run_from_being_described(
    tmp_path, content
):
    """Killed before its first row, in the middle of one, or damaged."""
    plan = _plan(tmp_path, rollout__lag=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    assert re.search(r"^lag +1 step\(s\): the engine samples", describe(plan), re.MULTILINE)


def test_the_engines_mesh_is_in_the_plan_and_must_divide_the_model(tmp_path):
    wide = {
        "model__architecture": {
            **demo.get_config().model.architecture.to_dict(),
            "num_heads": 4,
            "num_kv_heads": 4,
        }
    }
    _, told = _packing(tmp_path, (1, 4, 2), rollout__local={"tensor": 4, "expert": 1}, **wide)
    assert ", tensor 4, at most 512 rows at a time" in told
    with pytest.raises(
        ValueError,
        match=r"config.rollout.local.tensor: got 3, must divide the model's num_kv_heads=4",
    ):
        _packing(tmp_path, (1, 4, 2), rollout__local={"tensor": 3, "expert": 1}, **wide)
    with pytest.raises(
        ValueError,
        match=r"config.rollout.local \(tensor=4, expert=1\): 4 does not divide the 2 dev",
    ):
        _packing(tmp_path, (1, 2, 1), rollout__local={"tensor": 4, "expert": 1}, **wide)


@pytest.mark.parametrize(
    ("source", "shape", "changes", "message"),
    [
        (
            demo_moe,
            (1, 1, 1, 3),
            {},
            "config.mesh.expert: got 3, must divide the model's 8 experts; that do 1, 2, .*",
        ),
        (
            demo,
            (1, 1, 1),
            {"rollout__router_replay": True},
            "config.rollout.router_replay: got True, the model is a qwen3, which has no experts",
        ),
        (
            demo,
            (1, 1, 1),
            {"algorithm__router_aux_loss": 0.01},
            "config.algorithm.router_aux_loss: got 0.01, the model is a qwen3, which has no "
            "experts",
        ),
        (
            demo,
            (1, 2, 1),
            {"model__compute_dtype": "bfloat16"},
            "config.model.compute_dtype: got 'bfloat16' with mesh.fsdp=2 on CPU devices, where "
            "XLA can't add up .*",
        ),
    ],
    ids=["mesh", "replay", "balancing", "bfloat16"],
)
def test_settings_of_experts_must_fit_the_model(tmp_path, source, shape, changes, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        _plan(tmp_path, shape, source, **changes)
    assert (
        _plan(tmp_path, (1, 1, 1, 2), demo_moe, rollout__router_replay=True).task.model.num_experts
        == 8
    )


def test_more_experts_for_a_token_than_there_are(tmp_path):
    config = demo_moe.get_config()
    config.run_dir, config.model.architecture.num_experts_per_tok = str(tmp_path / "run"), 9
    with pytest.raises(
        UserError,
        match="^config.model.architecture.num_experts_per_tok: got 9, must be at most num_e",
    ):
        Run.check(from_config_dict(config))


def test_rows_that_do_not_fit_are_lowered_once_and_kept_by_the_run(tmp_path, monkeypatch):
    """What is sampled is no function of an estimate made anew: the first start's number is in
    config.json.
    """

    def started(free, rows=256):
        monkeypatch.setattr(
            placement,
            "this_machine",
            lambda platform: Machine(
                platform="gpu", devices=1, device_bytes=free, host_bytes=2**40
            ),
        )
        return _plan(tmp_path, rollout__max_rows=rows, rollout__min_rows=8)

    roomy = started(None).placement
    assert roomy.engine.memory.rows == roomy.engine.arguments.max_rows == 256
    # Prompts are padded to 32 slots; 3 layers of one head of 32 numbers, keys and values, in
    # float32.
    cache_bytes = bytes_of(roomy.engine.memory, "key-value cache")
    assert cache_bytes == 256 * (32 + 36) * 2 * 3 * 1 * 32 * 4
    full = roomy.engine.memory.total("sample", "device")
    small = started(full - cache_bytes // 2)
    setup = small.placement.engine
    rows = setup.memory.rows
    assert 8 <= rows < 256 and setup.arguments.max_rows == rows
    assert setup.memory.total("sample", "device") <= full - cache_bytes // 2
    assert f"at most {rows} rows at a time (rollout.max_rows=256 does not fit)" in describe(small)
    (tmp_path / "run").mkdir()
    run_directory.record_config(small.task.config, rows)
    # Resumed where there is more memory, or nobody knows how much.
    for free in (None, full):
        assert started(free).placement.engine.memory.rows == rows
    # Another number of rows gets a new estimate.
    assert started(full, rows=128).placement.engine.memory.rows == 128


def test_a_method_without_lambda_names_neither_c_nor_eta():
    assert description._method(AlgorithmSettings(method="grpo")) == "grpo"
    line = description._method(AlgorithmSettings(method="dual_grpo"))
    assert line == "dual_grpo, c = 0.0037, lambda = 1 throughout"

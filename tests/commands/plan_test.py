"""The command line of bin.plan. What it compiles is tested in tests/plan."""

import json
import re

import jax
import pytest

from dcmdp_jax.commands import plan
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.topologies import CHIPS, Topology

_CONFIG = "--config=configs/qwen3_8b.py"


def test_a_remedy_that_returns_nan_is_refused_before_a_compiler_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "def nan(tokens):\n    return tokens.advantages * float('nan')\n"
    )
    monkeypatch.setattr(plan, "load_topology", lambda name: pytest.fail("asked for a compiler"))
    method = f"{tmp_path}/mine.py:nan"
    with pytest.raises(UserError) as raised:
        plan.main(["bin.plan", _CONFIG, "--topology=h100:8", f"--config.algorithm.method={method}"])
    where, _, said = str(raised.value).partition(f": {method}: ")
    assert where == "config.algorithm.method"
    assert (
        said == "returned advantages that are not finite on 22 of 22 tokens with finite log-probs"
    )


def test_a_mesh_that_does_not_fit_is_refused_before_a_compiler_is_asked_for():
    with pytest.raises(
        UserError, match=r"config.mesh .*3 does not divide the 8 devices; that do 1, 2, 4, 8"
    ):
        plan.main(["bin.plan", _CONFIG, "--topology=h100:8", "--config.mesh.tensor=3"])


def test_it_prints_and_writes_a_plan(tmp_path, monkeypatch, capsys):
    devices = Topology(name="v5e:2x2", chip=CHIPS["v5e"], devices=jax.devices()[:1])
    monkeypatch.setattr(plan, "load_topology", lambda name: devices)
    monkeypatch.setattr(plan, "set_environment", lambda: None)
    file = tmp_path / "plan.json"
    arguments = [
        f"{_CONFIG}:local,debug",
        "--topology=v5e:2x2",
        "--programs=prefill",
        f"--json={file}",
    ]
    assert plan.main(["bin.plan", *arguments]) == 0
    assert "memory of each device" in capsys.readouterr().out
    assert list(json.loads(file.read_text())["programs"]) == ["prefill"]


def test_a_supervised_run_has_no_engine_and_one_completion_of_a_prompt(tmp_path, monkeypatch):
    devices = Topology(name="v5e:2x2", chip=CHIPS["v5e"], devices=jax.devices()[:1])
    monkeypatch.setattr(plan, "load_topology", lambda name: devices)
    monkeypatch.setattr(plan, "set_environment", lambda: None)
    found = {}
    for loss in ("surrogate", "likelihood"):
        file = tmp_path / f"{loss}.json"
        words = [
            f"{_CONFIG}:local,debug",
            "--topology=v5e:2x2",
            f"--json={file}",
            f"--config.algorithm.loss={loss}",
        ]
        words += [
            f"--config.training.{name}=4" for name in ("prompts_per_step", "prompts_per_mini_batch")
        ]
        assert plan.main(["bin.plan", *words]) == 0
        found[loss] = json.loads(file.read_text())["programs"]
    assert list(found["surrogate"]) == ["step", "prefill", "decode", "score"] and list(
        found["likelihood"]
    ) == ["step"]
    # A batch of 1 completion a prompt, not of 4.
    assert (
        found["likelihood"]["step"]["argument_bytes"] < found["surrogate"]["step"]["argument_bytes"]
    )


def test_adapters_that_vllm_can_not_hold_are_refused_before_a_compiler_is_asked_for():
    words = [
        "--config=configs/demo_vllm.py:float32",
        "--topology=h100:1",
        "--config.model.lora_rank=4",
    ]
    with pytest.raises(
        UserError, match=r"config.rollout.vllm.adapters: got True with float32; vLLM's CUDA build"
    ):
        plan.main(["bin.plan", *words, "--config.rollout.vllm.adapters=True"])


def test_adapters_of_an_unknown_shape_are_refused_and_not_planned_as_training_of_all():
    said = (
        "config.model.adapter: a plan does not read it; give the shape as model.lora_rank, "
        "lora_alpha"
    )
    given = [
        "plan",
        "--config=configs/qwen3_8b.py",
        "--topology=h100:8",
        "--config.model.adapter=trained",
    ]
    with pytest.raises(UserError, match=re.escape(said)):
        plan.main(given)

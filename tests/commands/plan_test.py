"""The command line of bin.plan. What it compiles is tested in tests/plan."""

from __future__ import annotations

import json

import jax
import pytest

from dcmdp_jax.commands import plan
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.topologies import CHIPS, Topology

_CONFIG = "--config=configs/qwen3_8b.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v5e:4x4"], "--config is missing"),
        ([_CONFIG], "--topology is missing; known are v5e:2x2, "),
        ([_CONFIG, "--topology=v9:2x2"], "--topology: got 'v9:2x2', known are v5e:2x2, "),
        ([_CONFIG, "--topology=v5e:4x4", "--programs=steps"], "--programs: got 'steps', allowed are step, prefill, "),
        ([_CONFIG, "--topolgy=v5e:4x4"], "--topolgy=v5e:4x4: no such argument; did you mean --topology?"),
        ([_CONFIG, "--topology=v5e:4x4", "--config.mesh.fsdpp=3"], "config.mesh.fsdpp: no such setting"),
        # Before anything is compiled.
        (
            [_CONFIG, "--topology=v5e:4x4", "--json=none/p.json"],
            "argument --json: got 'none/p.json', in a directory",
        ),
        (
            [_CONFIG, "--topology=v5e:4x4", "--lengths=normal(1,2)"],
            "--lengths: got 'normal(1,2)', must be lognormal(",
        ),
        (
            [_CONFIG, "--topology=v5e:4x4", "--lengths=lognormal(2048,9999)"],
            "--lengths: got lognormal(2048,9999), must have 1 <= MEDIAN <= CAP <= rollout.max_completion_tokens = 8192",
        ),
        (
            [_CONFIG, "--topology=v5e:4x4", "--lengths=lognormal(2048,8192)", "--search"],
            "--lengths: got with --search, which compares worst cases; give one of the two",
        ),
        ([_CONFIG, "--topology=v5e:4x4", "--json=docs"], "argument --json: got 'docs', which is a directory; name a"),
        (
            [_CONFIG, "--topology=v5e:4x4", "--json=/dev/null"],
            "argument --json: got '/dev/null', which is a FIFO",
        ),
        ([_CONFIG, "--topology=v5e:4x4", f"--json={'p' * 300}"], "argument --json: got 'ppp"),
    ],
)
def test_a_wrong_argument_is_told_in_a_line(arguments, message, monkeypatch):
    monkeypatch.setattr(plan, "compile_run", lambda *_, **__: pytest.fail("something was compiled"))
    with pytest.raises(UserError) as raised:
        plan.main(["bin.plan", *arguments])
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


_30B = "--config=configs/qwen3_30b_a3b.py"


@pytest.mark.parametrize("search", [[], ["--search"]])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([_30B, "--topology=v5p:4x4x2"], "config.model: qwen3_moe on a TPU is torch code inside vLLM, which takes no"),
        (
            [_30B, "--topology=h100:32", "--config.rollout.precision=int8"],
            "config.rollout.precision: got 'int8', which the bridge has no mixture of experts in",
        ),
        (
            [_CONFIG, "--topology=v5e:4x4", "--config.rollout.engine=vllm"],
            "config.rollout.vllm.visible_devices: empty; a TPU chip belongs to one process",
        ),
        (
            [_CONFIG, "--topology=v5e:4x4", "--config.rollout.engine=vllm", "--config.rollout.precision=fp8"],
            "config.rollout.precision: got 'fp8'; on a TPU weights are pushed as bfloat16 or float32",
        ),
        (
            [_CONFIG, "--topology=h100:8", "--config.rollout.max_completion_tokens=60000"],
            "config.rollout.max_completion_tokens: 60000 and task.max_prompt_tokens=1024 make 61024",
        ),
        (
            [_CONFIG, "--topology=h100:8", "--config.rollout.engine=local", "--config.rollout.local.tensor=3"],
            "config.rollout.local.tensor: got 3",
        ),
        (
            [_CONFIG, "--topology=h100:8", "--config.rollout.router_replay=true"],
            "config.rollout.router_replay: got Tru",
        ),
        (
            [_CONFIG, "--topology=h100:2", "--config.rollout.engine=vllm", "--config.rollout.vllm.replicas=5"],
            "config.rollout.vllm.replicas: got 5 of rollout.vllm.tensor_parallel_size=1 devices each, and there are 2 "
            "(0,1), not 5; lower",
        ),
        (
            # Two hosts of eight: each has replicas of its own.
            [_CONFIG, "--topology=h100:16", "--config.rollout.engine=vllm", "--config.rollout.vllm.replicas=9"],
            "config.rollout.vllm.replicas: got 9 of rollout.vllm.tensor_parallel_size=1 devices each, and there are 8 ",
        ),
        (
            [
                _CONFIG,
                "--topology=h100:8",
                "--config.rollout.engine=vllm",
                "--config.rollout.vllm.tensor_parallel_size=3",
            ],
            "config.rollout.vllm.tensor_parallel_size: got 3, and the model has 32 heads and 8 key-value heads; that "
            "do 1, 2, 4, 8, 16, 32",
        ),
        ([_CONFIG, "--topology=h100:8", "--config.model.attention=splash"], "config.model.attention: got 'splash', wh"),
    ],
)
def test_what_training_would_refuse_is_refused_before_a_compiler_is_asked_for(monkeypatch, arguments, message, search):
    def no_compiler(name):
        raise AssertionError("asked for a compiler")

    monkeypatch.setattr(plan, "load_topology", no_compiler)
    with pytest.raises(UserError) as raised:
        plan.main(["bin.plan", *arguments, *search])
    assert str(raised.value).startswith(message)


def test_a_remedy_that_returns_nan_is_refused_before_a_compiler_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def nan(tokens):\n    return tokens.advantages * float('nan')\n")
    monkeypatch.setattr(plan, "load_topology", lambda name: pytest.fail("asked for a compiler"))
    method = f"{tmp_path}/mine.py:nan"
    with pytest.raises(UserError) as raised:
        plan.main(["bin.plan", _CONFIG, "--topology=h100:8", f"--config.algorithm.method={method}"])
    where, _, said = str(raised.value).partition(f": {method}: ")
    assert where == "config.algorithm.method"
    assert said == "returned advantages that are not finite on 22 of 22 tokens with finite log-probs"


def test_a_mesh_that_does_not_fit_is_refused_before_a_compiler_is_asked_for():
    with pytest.raises(UserError, match=r"config.mesh .*3 does not divide the 8 devices; that do 1, 2, 4, 8"):
        plan.main(["bin.plan", _CONFIG, "--topology=h100:8", "--config.mesh.tensor=3"])


def test_it_prints_and_writes_a_plan(tmp_path, monkeypatch, capsys):
    devices = Topology("v5e:2x2", CHIPS["v5e"], jax.devices()[:1])
    monkeypatch.setattr(plan, "load_topology", lambda name: devices)
    monkeypatch.setattr(plan, "set_environment", lambda: None)
    file = tmp_path / "plan.json"
    arguments = [f"{_CONFIG}:local,debug", "--topology=v5e:2x2", "--programs=prefill", f"--json={file}"]
    assert plan.main(["bin.plan", *arguments]) == 0
    assert "memory of each device" in capsys.readouterr().out
    assert list(json.loads(file.read_text())["programs"]) == ["prefill"]

"""The command line of bin.plan. What it compiles is tested in tests/plan."""

import json

import jax
import pytest

from dcmdp_jax.commands import plan
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.topologies import CHIPS, Topology

_CONFIG = "--config=configs/qwen3_8b.py"


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

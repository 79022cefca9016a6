"""The command line of bin.plan. What it compiles is tested in tests/plan."""

from __future__ import annotations

import json

import jax
import pytest

from bin import plan
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
    ],
)
def test_a_wrong_argument_is_told_in_a_line(arguments, message):
    with pytest.raises(UserError) as raised:
        plan.main(["bin.plan", *arguments])
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_it_prints_and_writes_a_plan(tmp_path, monkeypatch, capsys):
    devices = Topology("v5e:2x2", CHIPS["v5e"], jax.devices()[:1])
    monkeypatch.setattr(plan, "load_topology", lambda name: devices)
    monkeypatch.setattr(plan, "set_environment", lambda: None)
    file = tmp_path / "plan.json"
    arguments = [f"{_CONFIG}:debug", "--topology=v5e:2x2", "--programs=prefill", f"--json={file}"]
    assert plan.main(["bin.plan", *arguments]) == 0
    assert "memory of each device" in capsys.readouterr().out
    assert list(json.loads(file.read_text())["programs"]) == ["prefill"]

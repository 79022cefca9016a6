"""The benchmark of the step's memory, at toy size on CPU devices."""

import json

import jax
import pytest

from benchmarks import memory
from dcmdp_jax.errors import UserError
from dcmdp_jax.plan.run_plan import GIB
from dcmdp_jax.plan.topologies import CHIPS, Topology


def test_the_largest_topology_of_each_kind_has_every_length():
    found = memory.points_to_measure(["h100:1", "h100:8", "v5e:4x4", "v5e:2x2", "h100:2"], [2, 4], 4)
    in_4 = "h100:1 h100:8 v5e:4x4 v5e:2x2 h100:2".split()
    assert found == [*((name, 4) for name in in_4), ("h100:8", 2), ("v5e:4x4", 2)]


def test_a_published_step_has_a_row_on_each_device():
    config = memory.step_config("Qwen3-0.6B", 8192)
    assert config.task.max_prompt_tokens + config.rollout.max_completion_tokens == 8192
    assert config.training.micro_batch_tokens == config.training.row_lengths[0] == 8192
    assert config.model.remat == "full"


@pytest.mark.long
def test_a_toy_run_writes_a_table_and_a_plot(tmp_path, monkeypatch, capsys):
    loaded = []

    def load(name):
        loaded.append(name)
        return Topology(name, CHIPS["h100"], jax.devices()[: int(name.partition(":")[2])])

    monkeypatch.setattr(memory, "load_topology", load)
    monkeypatch.setattr(memory, "set_environment", lambda: None)
    file, plot = tmp_path / "memory.json", tmp_path / "memory.png"
    asked = "memory --model=toy --topologies=h100:1,h100:2 --lengths=32,64 --length=64"
    arguments = [*asked.split(), f"--json={file}", f"--plot={plot}"]
    memory.main(arguments)
    assert loaded == ["h100:1", "h100:2", "h100:2"]
    one, two, short = (memory.Point(**point) for point in json.loads(file.read_text())["points"])
    assert [(p.devices, p.length) for p in (one, two, short)] == [(1, 64), (2, 64), (2, 32)]
    # Two devices hold half of each matrix; rows of half the length need less.
    assert 0.5 * one.state < two.state < 0.6 * one.state and short.state == two.state
    assert short.temporary < two.temporary and all(p.fits and p.peak > p.state for p in (one, two, short))
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert f"| h100:2 | 64 | {two.state / GIB:.2f} | {two.temporary / GIB:.2f} |" in table
    # What is there is not compiled again.
    memory.main(arguments)
    assert len(loaded) == 3


def test_a_point_that_does_not_fit_is_told_so():
    point = memory.Point("v5e:2x2", 4, 64, GIB, 0, 20 * GIB, 18 * GIB, 15 * GIB, False, 3.0)
    assert memory.table([point]).splitlines()[-1] == (
        "| v5e:2x2 | 64 | 1.00 | does not fit | 20.00 | 15.0 | 18.00 | 3 |"
    )
    assert memory.draw([point], "toy", 64).axes[0].lines


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--topologies=h100:x", "--topology: got 'h100:x', known are"),
        ("--lengths=0", "got '0', must be a whole"),
        ("--model=GPT-2", "invalid choice: 'GPT-2'"),
    ],
)
def test_bad_arguments(argument, message):
    with pytest.raises(UserError, match=message):
        memory.main(["memory", argument])

"""Grids of runs, and the studies that are refused."""

from pathlib import Path

import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.studies.study import Arm, Study, check_collisions, runs_of


def _study(arms, *, baseline=None, seeds=(0, 1)):
    return Study("T", arms, baseline or next(iter(arms)), seeds)


def test_runs_come_seed_by_seed_with_directories_of_their_own():
    study = _study({"a": Arm("c.py:grpo"), "b=0.1": Arm("c.py", {"x.y": 0.1, "x.on": True, "x.lengths": (64, 128)})})
    runs = runs_of(study, Path("out"), ["--config.z=3"])
    assert [(run.label, str(run.directory)) for run in runs] == [
        ("a, seed 0", "out/a/seed0"),
        ("b=0.1, seed 0", "out/b=0.1/seed0"),
        ("a, seed 1", "out/a/seed1"),
        ("b=0.1, seed 1", "out/b=0.1/seed1"),
    ]
    assert runs[1].arguments == (
        "--config=c.py", "--config.x.y=0.1", "--config.x.on=true", "--config.x.lengths=(64,128)", "--config.z=3",
        "--config.training.seed=0", "--config.run_dir=out/b=0.1/seed0",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("study", "message"),
    [
        (_study({"a": Arm("c.py"), "A": Arm("d.py")}), "arms 'a' and 'A' would share a directory"),
        (_study({"a/b": Arm("c.py")}), "arm 'a/b' names a directory"),
        (_study({"..": Arm("c.py")}), r"arm '\.\.' names a directory"),
        (_study({"a": Arm("c.py", {"training.seed": 3})}), "arm 'a' sets training.seed, which the study sets"),
        (_study({"a": Arm("c.py", {"run_dir": "x"})}), "arm 'a' sets run_dir"),
        (_study({"a": Arm("c.py")}, seeds=(0, 1, 0)), "seed 0 is there twice"),
        (_study({"a": Arm("c.py")}, seeds=()), "1 arms and 0 seeds, must have at least one of each"),
        (_study({"a": Arm("c.py")}, baseline="b"), "the baseline 'b' is none of its arms a"),
    ],
)
def test_a_study_that_cannot_be_run_is_one_line(study, message):
    with pytest.raises(UserError, match=message) as caught:
        runs_of(study, Path("out"))
    assert "\n" not in str(caught.value)


def test_two_arms_of_one_config_collide():
    runs = runs_of(_study({"a": Arm("c.py"), "b": Arm("c.py", {"x": 1})}, seeds=(0,)), Path("out"))
    config = {"run_dir": "out/a/seed0", "algorithm": {"tolerance": 0.1}}
    with pytest.raises(UserError, match="'a, seed 0' and 'b, seed 0' are one config, every setting is equal"):
        check_collisions(runs, [config, {**config, "run_dir": "out/b/seed0"}])
    check_collisions(runs, [config, {**config, "algorithm": {"tolerance": 0.2}}])

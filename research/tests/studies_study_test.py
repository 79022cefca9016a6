"""Grids of runs, and the studies that are refused."""

from pathlib import Path

import pytest

from dcmdp_jax.errors import UserError
from research.studies.study import Arm, Study, check_collisions, runs_of


def _study(arms, *, baseline=None, seeds=(0, 1)):
    return Study("T", arms, baseline or next(iter(arms)), seeds)


def test_runs_come_seed_by_seed_with_directories_of_their_own():
    study = _study(
        {
            "a": Arm("c.py:grpo"),
            "b=0.1": Arm("c.py", {"x.y": 0.1, "x.on": True, "x.lengths": (64, 128)}),
        }
    )
    runs = runs_of(study, Path("out"), ["--config.z=3"])
    assert [(run.label, str(run.directory)) for run in runs] == [
        ("a, seed 0", "out/a/seed0"),
        ("b=0.1, seed 0", "out/b=0.1/seed0"),
        ("a, seed 1", "out/a/seed1"),
        ("b=0.1, seed 1", "out/b=0.1/seed1"),
    ]
    asked = (
        "--config=c.py --config.x.y=0.1 --config.x.on=true --config.x.lengths=(64,128) --config.z=3"
    )
    assert runs[1].arguments == (
        *asked.split(),
        "--config.training.seed=0",
        "--config.run_dir=out/b=0.1/seed0",
    )


_ARM = Arm("c.py")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arms": {"a": _ARM, "A": Arm("d.py")}}, "arms 'a' and 'A' would share a directory"),
        ({"arms": {"a": _ARM, "a/b": _ARM}}, "arm 'a/b' names a directory"),
        ({"arms": {"a": _ARM, "..": _ARM}}, r"arm '\.\.' names a directory"),
        (
            {"arms": {"a": _ARM, 0.1: _ARM}},
            "an arm's label is 0.1, must be text, which names a directory",
        ),
        ({"arms": {"a": "c.py"}}, "arm 'a' is 'c.py', must be an Arm"),
        ({"arms": [_ARM]}, r"the arms are \[Arm\(.*, must be a mapping from label to Arm"),
        (
            {"arms": {"a": Arm("c.py", {"training.seed": 3})}},
            "arm 'a' sets training.seed, which the study sets",
        ),
        ({"arms": {"a": Arm("c.py", {"run_dir": "x"})}}, "arm 'a' sets run_dir"),
        ({"seeds": (0, 1, 0)}, "seed 0 is there twice"),
        ({"seeds": ()}, "1 arms and 0 seeds, must have at least one of each"),
        ({"seeds": 3}, "seeds is 3, must be a tuple of whole numbers"),
        ({"seeds": "012"}, "seeds is '012', must be a tuple of whole numbers"),
        ({"seeds": (0, "1")}, r"seeds is \(0, '1'\), must be a tuple of whole numbers"),
        ({"seeds": (True,)}, r"seeds is \(True,\), must be a tuple of whole numbers"),
        ({"seeds": (-1,)}, r"seed -1: must be in \[0, 2147483647\]"),
        ({"baseline": "b"}, "the baseline 'b' is none of its arms a"),
        ({"baseline": ["a"]}, r"the baseline \['a'\] is none of its arms a"),
        ({"title": 3}, "the title is 3, must be text"),
        (
            {"evaluation": "--tasks=x.jsonl"},
            "evaluation is '--tasks=x.jsonl', must be a tuple of texts",
        ),
        (
            {"evaluation": ("--samples", 4)},
            r"evaluation is \('--samples', 4\), must be a tuple of texts",
        ),
        (
            {"evaluation": ("--out=x.json",)},
            "evaluation has --out=x.json, which the study gives for each run",
        ),
    ],
)
def test_a_study_that_cannot_be_run_is_one_line(changed, message):
    study = {"title": "T", "arms": {"a": _ARM}, "baseline": "a", "seeds": (0, 1)}
    with pytest.raises(UserError, match=f"^{message}") as caught:
        Study(**study | changed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (3, {}, "an arm's config is 3, must be text"),
        ("c.py", 3, "an arm's settings are 3, must be a mapping"),
        ("c.py", ["x.y"], r"an arm's settings are \['x.y'\], must be a mapping"),
        ("c.py", {1: 2}, "an arm's settings are {1: 2}, must be a mapping from a setting's name"),
    ],
)
def test_an_arm_that_cannot_be_run_is_one_line(config, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        Arm(config, settings)


def test_two_arms_of_one_config_collide():
    runs = runs_of(_study({"a": Arm("c.py"), "b": Arm("c.py", {"x": 1})}, seeds=(0,)), Path("out"))
    config = {"run_dir": "out/a/seed0", "algorithm": {"method": "dc_grpo", "tolerance": 0.1}}
    with pytest.raises(
        UserError,
        match="'a, seed 0' and 'b, seed 0' are one config, every setting that is used is equal",
    ):
        check_collisions(runs, [config, {**config, "run_dir": "out/b/seed0"}])
    check_collisions(
        runs, [config, {**config, "algorithm": {"method": "dc_grpo", "tolerance": 0.2}}]
    )


def test_arms_that_differ_in_settings_that_their_method_does_not_use_collide():
    runs = runs_of(_study({"a": Arm("c.py"), "b": Arm("c.py", {"x": 1})}, seeds=(0,)), Path("out"))

    def config(**algorithm):
        return {"run_dir": "out", "algorithm": {"multiplier": 0.1, "level": "token", **algorithm}}

    check_collisions(runs, [config(method="dc_grpo"), config(method="dc_grpo", multiplier=0.2)])
    check_collisions(
        runs, [config(method="dual_grpo"), config(method="dual_grpo", level="sequence")]
    )
    for first, second in (
        ({"method": "dual_grpo"}, {"method": "dual_grpo", "multiplier": 0.2}),
        ({"method": "grpo"}, {"method": "grpo", "level": "sequence"}),
    ):
        with pytest.raises(UserError, match="are one config"):
            check_collisions(runs, [config(**first), config(**second)])

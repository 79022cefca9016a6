"""What each arm resolves to: its row by hand, and what is refused before the first run."""

import pytest

from dcmdp_jax.errors import UserError
from research.studies.arms import check_arm
from research.studies.study import Arm
from research.studies.sweep import arm_values, default_values, load_study, table_of

_DEMO = {
    "algorithm.tolerance_steps": 0,
    "optimizer.learning_rate": 1e-4,
    "training.prompts_per_step": 48,
    "training.prompts_per_mini_batch": 24,
}
_PAPER = {
    "algorithm.method": "dc_grpo",
    "algorithm.tolerance": 0.0037,
    "algorithm.dual_learning_rate": 1.0,
}


def _check(label, arm, given=()):
    check_arm(
        label,
        arm,
        arm_values(arm),
        {*arm.settings, *given},
        default_values(),
        arm_values(Arm("configs/qwen3_8b.py")),
    )


def test_an_arm_that_inherits_a_demos_step_size_is_refused():
    """The fault of 2026-11-27: an arm named after the paper's eta of 1 that had the demo's 50."""
    arm = Arm(
        "configs/demo.py", _DEMO | {"algorithm.method": "dc_grpo", "algorithm.tolerance": 0.0037}
    )
    said = r"arm 'x' inherits algorithm.dual_learning_rate=50.0 from configs/demo.py; say it in the arm$"
    with pytest.raises(UserError, match=said):
        _check("x", arm)
    _check("x", arm, given=["algorithm.dual_learning_rate"])  # the command line says it
    _check("x", Arm("configs/demo.py", dict(arm.settings) | {"algorithm.dual_learning_rate": 50.0}))


def test_what_an_arm_does_not_use_need_not_be_said():
    """GRPO has no ascent; but its updates per weight sync and its learning rate are the demo's."""
    _check("grpo", Arm("configs/demo.py", _DEMO | {"algorithm.method": "grpo"}))
    few = {
        name: value for name, value in _DEMO.items() if name != "training.prompts_per_mini_batch"
    }
    with pytest.raises(
        UserError, match="inherits training.prompts_per_mini_batch=24 from configs/demo.py"
    ):
        _check("grpo", Arm("configs/demo.py", few | {"algorithm.method": "grpo"}))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"algorithm.method": "dual_grpo", "algorithm.multiplier": 0.3}, "algorithm.multiplier"),
        ({"algorithm.method": "grpo", "algorithm.level": "sequence"}, "algorithm.level"),
        ({"algorithm.tolerance": 0.01, "algorithm.tolerance_steps": 4}, "algorithm.tolerance"),
        ({"algorithm.dual_learning_rate": 0.0, "algorithm.tolerance": 0.01}, "algorithm.tolerance"),
    ],
)
def test_a_setting_that_the_arms_other_settings_override_is_refused(settings, name):
    with pytest.raises(
        UserError, match=f"arm 'x' names {name}, which its other settings override; leave it out$"
    ):
        _check("x", Arm("configs/base.py", settings))


def test_an_arm_with_the_papers_name_is_the_papers_but_for_what_it_says():
    _check("lag0_dc_grpo", Arm("configs/base.py", _PAPER))
    other = Arm("configs/base.py", _PAPER | {"algorithm.dual_learning_rate": 50.0})
    said = r"arm 'dc_grpo' has the paper's name and algorithm.dual_learning_rate=50.0, the paper's is 1.0"
    with pytest.raises(UserError, match=said):
        _check("dc_grpo", other)
    _check("ascent", other)
    _check("dc_grpo_eta50", Arm(other.config, other.settings, differs=("dual_learning_rate",)))
    for label in ("dc_grpo", "ascent"):
        with pytest.raises(
            UserError, match="says that it differs from the paper in 'tolerance', and does not"
        ):
            _check(label, Arm("configs/base.py", _PAPER, differs=("tolerance",)))
    with pytest.raises(
        UserError, match=r"an arm's `differs` is 'tolerance', must be a tuple of names"
    ):
        Arm("configs/base.py", _PAPER, differs="tolerance")


def test_the_rows_of_arms_by_hand():
    """48 prompts in mini-batches of 12: four updates per weight sync."""
    arms = {
        "grpo": Arm("demo", {"algorithm.method": "grpo", "rollout.precision": "int4"}),
        "dc": Arm("demo", {"training.prompts_per_mini_batch": 12, "algorithm.tolerance_steps": 0}),
        "measured": Arm(
            "demo", {"algorithm.budget": "p95", "algorithm.corrections": "tis", "rollout.lag": 2}
        ),
        "threshold": Arm(
            "demo", {"algorithm.method": "threshold_grpo", "algorithm.normalize_std": False}
        ),
    }
    _, _, *rows = (line.strip("| ").split(" | ") for line in table_of(arms).splitlines())
    mean = "seq_mean_token_mean"
    assert rows == [
        [
            "`grpo`",
            "grpo",
            "0",
            "-",
            "-",
            "-",
            "diff",
            "-",
            mean,
            "yes",
            "2",
            "local int4",
            "40",
            "-",
            "-",
        ],
        [
            "`dc`",
            "dc_grpo",
            "0.1",
            "0.0012",
            "50",
            "1",
            "diff",
            "token",
            mean,
            "yes",
            "4",
            "local fp8",
            "40",
            "-",
            "-",
        ],
        [
            "`measured`",
            "dc_grpo",
            "0.1",
            "1.25 x first 4 steps",
            "50",
            "1",
            "diff",
            "token",
            mean,
            "yes",
            "2",
            "local fp8 lag=2",
            "40",
            "corrections=tis",
            "-",
        ],
        [
            "`threshold`",
            "threshold_grpo",
            "1",
            "0.0012",
            "-",
            "-",
            "diff",
            "token",
            mean,
            "no",
            "2",
            "local fp8",
            "40",
            "-",
            "-",
        ],
    ]


def test_the_papers_arms_of_the_paper_sized_studies_are_the_papers():
    for study in ("methods:paper", "main_results:paper", "remedies:paper"):
        arms = {label: arm for label, arm in load_study(study).arms.items() if "dc_grpo" in label}
        assert arms and not any(arm.differs for arm in arms.values()), study
        for label, arm in arms.items():
            _check(label, arm)

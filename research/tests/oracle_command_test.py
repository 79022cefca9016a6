"""`python -m research.oracle`: the gradients of every remedy, the arms of a study, and what is
refused.
"""

import functools
import json

import pytest

from dcmdp_jax.algorithm.corrections import CORRECTIONS
from dcmdp_jax.algorithm.losses import LOSSES
from dcmdp_jax.algorithm.penalties import PENALTIES
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.models.hf_weights import save_params
from research.oracle.__main__ import arms_of, main
from tests.support.commands import run_command
from tests.support.tiny_model import CONFIG, TOKENIZER, params

_TASK = "--config.task.train=arithmetic:difficulty=1,count=8,seed=0"
_LIMIT = "--config.rollout.max_completion_tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model with the built-in task's tokenizer, as a Hugging Face directory."""
    root = tmp_path_factory.mktemp("models")
    save_tokenizer(TOKENIZER, root / "tokenizer", (TOKENIZER.eos_token_id,))
    save_params(params(), CONFIG, root / "model", dtype="float32", tokenizer_dir=root / "tokenizer")
    return root / "model"


_run = functools.partial(run_command, main, "oracle")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give one of --model DIR and --config FILE"),
        (
            ("--model", "none", "--a", "local", "--b", "hf"),
            "--b: got hf:float32; remedies are compared",
        ),
        (
            ("--model", "none", "--a", "local", "--top-p", "0.9"),
            "--top-p: got 0.9; whole distributions are compared",
        ),
        (("--model", "none", "--a", "local", "--batches", "3"), "must be at least 4"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(capsys, arguments, text):
    code, said, error = _run(capsys, *arguments)
    assert code == 2 and said == "" and text in error and error.count("\n") == 1


@pytest.mark.long
def test_remedies_are_compared_by_the_gradients_they_give(model, tmp_path, capsys):
    # A random model never answers right: a reward that it can earn, beside one that is the same for
    # all, with weights.
    function = tmp_path / "own.py"
    function.write_text(
        "def third(completions, **columns):\n    return [sum(map(ord, text)) % 3 == 0 for text in "
        "completions]\ndef tenth(completions, answer, **columns):\n    return [0.1 * (len(each) > "
        "0) for each in answer]\n"
    )
    rewards = (
        f"--config.rewards.functions={function}:third,{function}:tenth",
        "--config.rewards.weights=(1,5)",
    )
    ask = (
        _TASK,
        "--prompts",
        "3",
        "--config.rollout.group_size=4",
        "--batches",
        "4",
        f"{_LIMIT}=6",
    )
    code, said, shown = _run(
        capsys, "--model", model, *ask, *rewards, "--a", "local:int4", "--out", tmp_path
    )
    assert code == 0, shown
    (record,) = json.loads((tmp_path / "remedies.json").read_text())
    names = [one["name"].partition("(")[0].partition(",")[0] for one in record["remedies"]]
    assert set(names) == {"no remedy", *PENALTIES, *CORRECTIONS, *TRUST_REGIONS, *LOSSES} - {
        "grpo",
        "surrogate",
        "likelihood",
    }
    assert (
        len(names)
        == 1
        + 2 * (len(PENALTIES) - 1)
        + len(CORRECTIONS)
        + 11
        + len(TRUST_REGIONS)
        + len(LOSSES)
        - 1
    )
    assert (
        record["engine"] == "local:int4"
        and record["discrepancy"] > 1e-3
        and 0.5 < record["reward"] < 1.5
    )
    for one in record["remedies"]:
        assert 0 <= one["dropped"] <= 1 and 0 <= one["effective"] <= 12, one
    assert f"best: {record['words']['best']}" in said and all(name in said for name in names)
    assert (
        tmp_path / "remedies.png"
    ).stat().st_size > 10_000 and f"wrote {tmp_path / 'remedies.json'}" in said


def test_the_arms_of_a_study_take_the_place_of_the_remedies():
    arms = arms_of("configs/studies/dose_response.py")
    assert arms["token_100"].multiplier == 100 and arms["reward_10"].level == "reward"
    assert len(arms) == 16 and not any(arm.startswith("state") for arm in arms)
    one_sided = arms_of("configs/studies/dose_response.py:one")
    assert len(one_sided) == 14 and {one.sided for one in one_sided.values()} == {"one"}
    assert set(arms_of("configs/studies/methods.py")) == {
        "grpo",
        "dual_grpo",
        "threshold_grpo",
        "dc_grpo",
    }


def test_remedies_of_answers_that_are_never_right_are_refused_in_one_line(model, tmp_path, capsys):
    ask = (
        _TASK,
        "--prompts",
        "2",
        "--config.rollout.group_size=16",
        "--batches",
        "4",
        f"{_LIMIT}=4",
        "--a",
        "local",
    )
    code, said, error = _run(capsys, "--model", model, *ask, "--out", tmp_path)
    assert (
        code == 2
        and said == ""
        and "the rewards of every prompt are all equal in three batches" in error
    )

"""Tasks of reasoning-gym by path: made from a seed, scored by the dataset itself."""

import sys
from pathlib import Path

import pytest
import reasoning_gym as gym

from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.rewards.reward_pool import Returned, RewardPool
from dcmdp_jax.user_files import load_object

_FILE = str(Path(__file__).resolve().parents[2] / "examples" / "plugins" / "gym_tasks.py")
_GYM = f"{_FILE}:gym"
_LOCATION = f"{_GYM},dataset=basic_arithmetic,size=6,seed=4,max_terms=3,allow_parentheses=false"


def _load(location, **options):
    return load_problems(location, keep_columns=True, **options)


def _score(**arguments):
    return load_object(f"{_FILE}:gym_score")(**arguments)


def test_problems_are_those_of_the_dataset():
    dataset = gym.create_dataset(
        "basic_arithmetic", size=6, seed=4, max_terms=3, allow_parentheses=False
    )
    problems = _load(_LOCATION)
    assert [problem.prompt for problem in problems] == [entry["question"] for entry in dataset]
    assert [problem.answer for problem in problems] == [entry["answer"] for entry in dataset]
    assert {problem.source for problem in problems} == {"basic_arithmetic"}
    assert _load(_LOCATION, limit=2) == problems[:2]


def test_the_dataset_scores_in_the_process_of_the_reward():
    """rectangle_count and others give a little for a wrong answer; spell_backward gives part of the
    word.
    """
    problems = _load(f"{_GYM},dataset=spell_backward,size=2,seed=1") + _load(_LOCATION, limit=1)
    dataset = gym.create_dataset("spell_backward", size=2, seed=1)
    first = dataset[0]["answer"]
    second = dataset[1]["answer"]
    texts = [f"<answer>{first}</answer>", rf"so \boxed{{{second[:-1]}x}}", "no answer"]
    expected = [
        dataset.score_answer(first, dataset[0]),
        dataset.score_answer(f"{second[:-1]}x", dataset[1]),
    ]
    expected.append(
        gym.create_dataset("basic_arithmetic", size=1).score_answer(None, {"answer": "1"})
    )
    assert expected[0] == 1.0 and expected[1] < 1.0
    column = [problem.columns["reasoning_gym"] for problem in problems]
    name = f"{_FILE}:gym_score"
    with RewardPool([name], ["reasoning_gym"], timeout_s=600.0) as pool:
        pool.begin(
            [problem.prompt for problem in problems], texts, [[1]] * 3, {"reasoning_gym": column}
        )
        assert pool.collect() == {name: Returned(expected)}


def test_a_problem_of_another_task_has_no_score():
    assert _score(completions=["1"], reasoning_gym=[None]) == [None]


def test_a_dataset_that_makes_other_problems_is_told():
    column = _load(_LOCATION, limit=1)[0].columns["reasoning_gym"] | {"answer": "other"}
    with pytest.raises(
        ValueError, match="basic_arithmetic makes another problem 0 in this process"
    ):
        _score(completions=["1"], reasoning_gym=[column])


def test_the_answer_is_the_last_one_given():
    answer_of = load_object(f"{_FILE}:answer_of")
    assert answer_of("<answer>1</answer> no, <answer> 2\n</answer>") == "2"
    assert answer_of(r"\boxed{1} then \boxed{x}") == "x"
    assert answer_of("3") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "name a dataset of reasoning-gym"),
        (
            ",dataset=basic_arithmetik",
            "has no dataset 'basic_arithmetik'; did you mean 'basic_arithmetic'?",
        ),
        (",dataset=basic_arithmetic,terms=3", "basic_arithmetic has no setting 'terms', it has "),
        (",dataset=basic_arithmetic,size=0", "size = 0 must be a whole number from 1 to"),
        (",dataset=basic_arithmetic,seed=x", "seed = 'x' must be a whole number from 0 to"),
        (",dataset=basic_arithmetic,size=2,size=3", "size is given twice"),
        (",dataset=basic_arithmetic,min_terms=9,max_terms=3", "basic_arithmetic refuses it: "),
    ],
)
def test_what_is_no_task_is_told_in_one_line(settings, message):
    with pytest.raises(ValueError) as raised:
        load_problems(f"{_GYM}{settings}")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_library_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="reasoning-gym is missing: pip install 'reasoning-gym"):
        load_problems(_LOCATION)

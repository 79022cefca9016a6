"""Mixtures: weights, names, and an order that is a function of seed and position."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcmdp_jax.data.mixtures import (
    Part,
    PromptStream,
    is_weighted,
    location_names,
    parse_mixture,
    prompt_order,
    split_locations,
)


def test_weights_stand_behind_each_location():
    found = parse_mixture(
        "a.jsonl@2, data/b.parquet@.5,arithmetic:difficulty=1,count=64@1,owner/name@main"
    )
    assert found == (
        Part(name="a", location="a.jsonl", weight=Fraction(2)),
        Part(name="b", location="data/b.parquet", weight=Fraction(1, 2)),
        Part(name="arithmetic", location="arithmetic:difficulty=1,count=64", weight=Fraction(1)),
        Part(
            name="name@main", location="owner/name@main", weight=Fraction(1)
        ),  # a configuration of the Hub is no weight
    )


def test_settings_of_a_function_belong_to_it():
    text = "my tasks/a.py:sums,size=10,seed=1,a.py:gcd@2,owner/set"
    assert split_locations(text) == ["my tasks/a.py:sums,size=10,seed=1", "a.py:gcd@2", "owner/set"]
    assert [part.name for part in parse_mixture(text)] == ["sums", "gcd", "set"]
    assert is_weighted("a.py:gcd@2") and not is_weighted("a.py:gcd,size=2")


def test_built_in_tasks_are_told_apart_by_their_arguments():
    names = location_names(["arithmetic:difficulty=1", "a/b.jsonl", "arithmetic:difficulty=2"])
    assert names == ["arithmetic_difficulty=1", "b", "arithmetic_difficulty=2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.jsonl@0,b.jsonl", "got 'a.jsonl@0', a weight must be above 0 and at most 1000000"),
        ("a.jsonl,", "an empty name is no task"),
        ("a.jsonl@1,a.jsonl@2", r"got 'a.jsonl' twice, name it once and raise its weight \(@2\)"),
        ("a.jsonl@0.333333,b.jsonl@0.1", "give them fewer digits"),
    ],
)
def test_what_is_no_mixture_is_told(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixture(text)


def test_one_task_is_asked_in_the_order_it_always_was():
    stream = PromptStream((10,), (Fraction(3),))
    np.testing.assert_array_equal(
        stream.at(seed=3, first=7, count=20), prompt_order(10, seed=3, first=7, count=20)
    )


def test_each_task_has_its_share_of_every_cycle_and_goes_through_its_problems():
    # Weights 2, 1, 1/2: 4 + 2 + 1 prompts in a cycle of 7. Places 0-2, 3-7, 8-12.
    stream = PromptStream((3, 5, 5), (Fraction(2), Fraction(1), Fraction(1, 2)))
    order = stream.at(seed=0, first=0, count=70)
    task = np.searchsorted([3, 8], order, side="right")
    for number in range(10):
        assert np.bincount(task[7 * number : 7 * number + 7]).tolist() == [4, 2, 1]
    own = order[task == 0]  # 40 prompts of the first task: 13 epochs of its 3 problems
    for epoch in range(13):
        assert sorted(own[3 * epoch : 3 * epoch + 3]) == [0, 1, 2]
    assert sorted(order[task == 2][:5]) == [8, 9, 10, 11, 12]
    assert not np.array_equal(order[:7], stream.at(seed=1, first=0, count=7))
    # The tasks are spread, not one after the other: never three of the second or third in a row.
    assert max(len(run) for run in "".join("x" if t else " " for t in task).split()) <= 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(0, 5),
)
def test_a_resumed_stream_goes_on_where_the_other_one_is(parts, first, count, seed):
    stream = PromptStream(
        tuple(size for size, _ in parts), tuple(Fraction(weight, 4) for _, weight in parts)
    )
    whole = stream.at(seed=seed, first=0, count=first + count)
    np.testing.assert_array_equal(whole[first:], stream.at(seed=seed, first=first, count=count))
    assert whole.min() >= 0 and whole.max() < sum(stream.sizes)

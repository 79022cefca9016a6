"""avg@K and pass@K against hand counts.

With the real verifier and tokenizer, and completions written out here.
"""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.evaluation.average import evaluate, join
from dcmdp_jax.evaluation.held_out import Overlap, describe_overlaps
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import MATH, Problem, Reward
from dcmdp_jax.rewards.scoring import RewardScorer


@dataclasses.dataclass
class _Script:
    """An engine that says what it was given: one list of texts for each prompt.

    A text that ends in "..." is cut.
    """

    texts: list[list[str]]
    calls: list[tuple] = dataclasses.field(default_factory=list)

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        """The last group first, and a list without any."""
        self.calls.append((prompts, sampling, seed, step))
        tokenizer = build_tokenizer()
        for group in reversed(range(len(prompts))):
            episodes = []
            for member, text in enumerate(self.texts[group]):
                cut = text.endswith("...")
                tokens = tokenizer(text.removesuffix("..."), add_special_tokens=False)["input_ids"]
                ids = np.array(tokens if cut else [*tokens, tokenizer.eos_token_id], np.int32)
                place = dict(policy_version=0, group=group, member=member)
                end = "length" if cut else "stop"
                episodes.append(
                    single_turn(prompts[group], ids, np.zeros(ids.size), **place, finish_reason=end)
                )
            yield episodes
            yield []


@pytest.fixture
def judged():
    """Runs `evaluate` on scripted texts."""
    with Verifier(num_workers=1, timeout_s=600.0) as verifier:

        def run(texts, answers, **settings):
            engine = _Script(texts)
            prompts = [np.array([5 + i], np.int32) for i in range(len(texts))]
            sampling = SamplingParams(
                group_size=len(texts[0]), max_completion_tokens=16, **settings
            )
            problems = [
                Problem(prompt="", answer=answer, source="s", index=0) for answer in answers
            ]
            scorer = RewardScorer(
                [Reward(MATH)], verifier, (), by_source=False, timeout_s=1.0, stop_on_error=True
            )
            parts = SimpleNamespace(
                engine=engine, scorer=scorer, tokenizer=build_tokenizer(), turns=None
            )
            return evaluate(
                parts,
                EncodedPrompts(problems=problems, token_ids=prompts),
                sampling,
                task="t",
                seed=7,
            ), engine

        yield run


def test_scores_lengths_and_truncation_against_a_hand_count(judged):
    result, _ = judged(
        [
            [r"\boxed{4}", r"\boxed{5}", r"2+2=4;\boxed{4}", "4"],  # right, wrong, right, no box
            [
                r"\boxed{4}",
                r"\boxed{4}",
                r"\boxed{4}...",
                "1...",
            ],  # the answer of another problem: wrong
            [r"\boxed{9}", r"\boxed{9}", r"\boxed{9}", r"\boxed{9}"],
        ],
        ["4", "7", "9"],
    )
    np.testing.assert_array_equal(result.scores, [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    assert (result.task, result.samples) == ("t", 4)
    # Not pass@4 = 2/3, and not the share of right answers among those that have a box, 6/10.
    assert result.average == 0.5
    # Between problems: means 1/2, 0, 1, deviation sqrt((0 + 1/4 + 1/4) / 2) = 1/2, over sqrt(3).
    # Over the twelve completions as if independent it would be 0.15.
    assert result.standard_error == pytest.approx(0.5 / math.sqrt(3), abs=1e-7)
    # `\boxed{` is one token: 3 tokens and the end make 4; "2+2=4;" adds 6; "4" is 2; cut ones have
    # no end token.
    lengths = [4, 4, 10, 2, 4, 4, 3, 1, 4, 4, 4, 4]
    assert result.length_mean == pytest.approx(sum(lengths) / 12, abs=1e-12)
    assert result.truncated.mean() == pytest.approx(2 / 12, abs=1e-12)
    # Cut or not, what has a box commits to an answer; "4" and "1..." do not.
    np.testing.assert_array_equal(result.unparsed, [[0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(result.truncated, [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(result.lengths, np.reshape(lengths, (3, 4)))
    # pass@2 of 2 right among 4: 1 - 1/6; the others are 0 and 1.
    assert result.pass_at[1] == pytest.approx((5 / 6 + 0 + 1) / 3) and result.pass_at[
        3
    ] == pytest.approx(2 / 3)
    assert result.unjudged == {
        "verifier_timeouts": 0,
        "verifier_errors": 0,
        "verifier_over_budget": 0,
    }


def test_a_single_problem_has_no_standard_error(judged):
    result, _ = judged([[r"\boxed{1}", r"\boxed{2}"]], ["1"])
    assert result.average == 0.5 and math.isnan(result.standard_error)


def test_an_answer_that_needs_algebra_is_judged_by_the_workers(judged):
    result, _ = judged([[r"\boxed{x+1}", r"\boxed{x-1}"]], ["1+x"])
    np.testing.assert_array_equal(result.scores, [[1, 0]])


def test_the_engine_is_asked_once_with_the_sampling_given_and_step_0(judged):
    _, engine = judged([[r"\boxed{1}"], [r"\boxed{1}"]], ["1", "1"], temperature=0.7, top_p=0.9)
    ((prompts, sampling, seed, step),) = engine.calls
    assert [list(prompt) for prompt in prompts] == [[5], [6]]
    assert (sampling.temperature, sampling.top_p, seed, step) == (0.7, 0.9, 7, 0)


def test_parts_join_and_an_overlap_shows_the_score_without_it(judged):
    texts = [[r"\boxed{4}", r"\boxed{5}"], [r"\boxed{4}...", "4"], [r"\boxed{9}", r"\boxed{9}"]]
    whole, _ = judged(texts, ["4", "7", "9"])
    first, _ = judged(texts[:2], ["4", "7"])
    last, _ = judged(texts[2:], ["9"])
    joined = join([first, last])
    for name in ("scores", "lengths", "truncated", "unparsed"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert [whole.average, *whole.problem_averages] == [0.5, 0.5, 0.0, 1.0]
    (line,) = describe_overlaps(
        [whole], {"t": [Overlap(problem=1, train_problem=9, share=1.0)]}, "a.jsonl", dropped=False
    )
    assert line == "overlap of t with a.jsonl: 1 problems; avg@2 is 50.0, without them 75.0"

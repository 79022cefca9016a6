"""Remedies without mismatch, the sizes of filters, what is refused, and the words."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.algorithm import AlgorithmSettings
from dcmdp_jax.config.load import for_sampling
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.probe.live.session import Session
from dcmdp_jax.run.saved_model import Policy, SavedModel
from dcmdp_jax.types import Rows
from research.oracle.gradients import JudgedBatch, Moments, quality, token_slopes
from research.oracle.oracle import EXACT, NOTHING, Verdict, Verdicts, ask, entries, summary
from research.oracle.page import draw, table
from tests.support.tiny_model import CONFIG, TOKENIZER, params


def _session(**settings):
    config = for_sampling(Config(), {"rollout.max_rows": 16, "training.seed": 0, **settings})
    saved = SavedModel("tiny", CONFIG, Path(), Path(), None, ())
    run = Policy(config, saved, CONFIG, TOKENIZER, (TOKENIZER.eos_token_id,))
    run.__dict__["params"] = params()  # read already
    return Session(
        run=run,
        problems=load_problems("arithmetic:difficulty=1,count=3,seed=0", limit=3),
        sampling=SamplingParams(4, 5, stop_token_ids=run.stop_token_ids),
        score_temperature=1.0,
        earlier=[],
        load=lambda path: None,
        rescore=False,
        show=lambda line: None,
    )


def _odd(problems, completion_ids):
    texts = TOKENIZER.batch_decode(completion_ids, skip_special_tokens=True)
    return [sum(map(ord, text)) % 2 for text in texts]


def test_without_mismatch_every_remedy_that_acts_on_it_gives_the_plain_slopes():
    rng = np.random.default_rng(0)
    shape = 12, 9
    mask = np.arange(9) < rng.integers(1, 10, (12, 1))
    train = np.where(mask, -rng.exponential(1.0, shape), 0.0).astype(np.float32)
    index = np.repeat(np.arange(12, dtype=np.int32)[:, None], 9, axis=1)
    rows = Rows(index, index, index, mask, index, {"rollout_logprobs": train})
    sampled = JudgedBatch(
        rows, rng.integers(0, 2, 12).astype(np.float32), np.repeat(np.arange(3), 4).astype(np.int32)
    )
    tokens = Tokens(
        train_logprobs=train,
        old_logprobs=train,
        rollout_logprobs=train,
        advantages=np.zeros(shape, np.float32),
        completion_mask=mask,
        completion_index=index,
        num_completions=12,
    )
    compared = entries(AlgorithmSettings(multiplier=0.5), tokens)
    slopes = {
        name: np.asarray(token_slopes(one, one.remedies(), sampled, train, 9))
        for name, one in compared.items()
    }
    assert np.abs(slopes[NOTHING]).max() > 0.01
    for name, found in slopes.items():
        np.testing.assert_allclose(found, slopes[NOTHING], rtol=1e-5, atol=1e-7, err_msg=name)


def test_a_penalty_inside_the_reward_gives_the_slopes_of_penalized_rewards():
    # One prompt, two completions of one token: |p - q| is 0.5 - 0.25 and 0; rewards 1 and 1, lambda
    # 2: 0.5 and 1.
    train = np.log(np.array([[0.5], [0.5]], np.float32))
    index = np.arange(2, dtype=np.int32)[:, None]
    mask = np.ones((2, 1), bool)
    rows = Rows(
        index, index, index, mask, index, {"rollout_logprobs": np.log(np.float32([[0.25], [0.5]]))}
    )
    groups = np.zeros(2, np.int32)
    plain = dataclasses.replace(AlgorithmSettings(), method="grpo", normalize_std=False)
    inside = dataclasses.replace(plain, method="dc_grpo", level="reward", multiplier=2.0)
    even, penalized = (
        JudgedBatch(rows, np.float32(rewards), groups) for rewards in ([1, 1], [0.5, 1])
    )
    found = np.asarray(token_slopes(inside, inside.remedies(), even, train, 1))
    np.testing.assert_allclose(
        found, token_slopes(plain, plain.remedies(), penalized, train, 1), rtol=1e-6
    )
    # Advantages -1/4 and 1/4, half of the batch each; the loss is negated.
    np.testing.assert_allclose(found, [[0.125], [-0.125]], rtol=1e-6)


def test_with_top_k_tokens_it_has_their_remedies_and_measures_of_whole_states():
    """The engine is the exact one: no state differs, and what teaches p towards q, or centres, adds
    nothing.
    """
    session = _session(**{"rollout.top_logprobs": 4})
    [found] = ask(session, [EXACT], AlgorithmSettings(multiplier=0.5), batches=4, grade=_odd)
    remedies = {one.name: one for one in found.remedies}
    assert {"state_tv", "state_delta"} < set(remedies)
    for name in ("state_kl", "score_centering", "tis,score_centering"):
        np.testing.assert_allclose(
            remedies[name].moments, remedies[NOTHING].moments, rtol=1e-3, err_msg=name
        )
    assert [each.exact for each in found.states[:-1]] == pytest.approx([0] * 4, abs=1e-5)
    assert 4 / CONFIG.vocab_size < found.states[-1].exact < 1 and "whole distributions" in table(
        found
    )


def test_a_filter_without_a_default_is_sized_to_drop_a_twentieth_of_the_tokens():
    rng = np.random.default_rng(1)
    old, rollout = (-rng.exponential(1.0, (50, 40)).astype(np.float32) for _ in range(2))
    index = np.repeat(np.arange(50, dtype=np.int32)[:, None], 40, axis=1)
    tokens = Tokens(
        train_logprobs=old,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=np.zeros((50, 40)),
        completion_mask=np.ones((50, 40), bool),
        completion_index=index,
        num_completions=50,
    )
    (name,) = [
        name
        for name in entries(AlgorithmSettings(), tokens)
        if name.startswith("kl_rejection(estimator=k1,over=token")
    ]
    # |log p - log q| of two exponentials is exponential: 5% are above ln 20 = 3.00.
    assert float(name.rpartition("=")[2].removesuffix(")")) == pytest.approx(np.log(20), abs=0.3)


@pytest.mark.parametrize(
    ("changes", "batches", "line"),
    [
        ({}, 3, "--batches: got 3, must be at least 4"),
        ({"sampling": SamplingParams(1, 5)}, 4, "config.rollout.group_size: got 1, must be"),
        (
            {"centred": True},
            4,
            "config.rollout.top_logprobs: got 0, score_centering needs the engine's top-k tokens",
        ),
        ({"sampling": SamplingParams(4, 5, 0.0)}, 4, "config.rollout.temperature: got 0 (greedy)"),
        (
            {"problems": [dataclasses.replace(p, answer="") for p in _session().problems]},
            4,
            "config.task.train: row 0 has no answer",
        ),
    ],
)
def test_what_it_can_not_compare_is_one_line_before_anything_is_sampled(changes, batches, line):
    algorithm = AlgorithmSettings(
        corrections="score_centering" if changes.pop("centred", False) else ""
    )
    with pytest.raises(ValueError) as raised:
        next(
            ask(
                dataclasses.replace(_session(), **changes),
                [EXACT],
                algorithm,
                batches=batches,
                grade=_odd,
            )
        )
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)


def _verdict(
    name, cosine, variance, *, length=1.0, gain=0.0, width=0.1, effective=12.0, dropped=0.0
):
    """At |G| = 1."""
    found = quality(Moments(length**2, length * cosine, 1.0, variance))
    return Verdict(
        name,
        Moments(length**2, length * cosine, 1.0, variance),
        found,
        found._replace(error=0.1, squared_bias=0.2),
        gain,
        width,
        effective,
        dropped,
    )


def _verdicts(*remedies, batches=5):
    return Verdicts(
        "m",
        "local:int4",
        3,
        4,
        batches,
        0.01,
        0.5,
        0.5,
        _verdict("exact control", 1, 1.0),
        remedies,
    )


def test_the_words_name_the_best_and_its_price():
    # 1 - 0.9^2 / (1 + 0.62) = 0.5 and 1 - 0.6^2 / (1 + 0.775) = 0.8; 0.62 / 0.775 = 0.8 of the
    # variance.
    found = _verdicts(
        _verdict("tis(high=2)", 0.9, 0.62, gain=0.3, effective=9, dropped=0.25),
        _verdict(NOTHING, 0.6, 0.775),
    )
    said = summary(found)
    assert said["best"] == (
        "tis(high=2): its gradient has the smallest error at its best length, 0.50 against 0.80 "
        "without remedy and 1 of a gradient of zero, on this model and engine"
    )
    assert said["cost"] == (
        "20% less variance at equal length; 25.0% of the tokens have no gradient; 9 effective "
        "samples of 12"
    )
    rows = [line.split()[0] for line in table(found).splitlines()]
    assert rows[1:6] == [
        "remedy",
        "tis(high=2)",
        "no",
        "a",
        "exact",
    ]  # a gradient of zero is after what beats it
    axes = draw(found).axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["tis(high=2)", NOTHING]
    assert all(
        [1.0, 1.0] in [list(line.get_xdata()) for line in panel.lines] for panel in axes
    )  # zero is marked


def test_a_lead_that_the_best_of_many_has_by_chance_is_called_that():
    # A lead of 0.2 is beyond an interval of 0.1; of 32 others in 5 batches that is nearly three
    # times as wide.
    others = [_verdict(f"other{i}", 0.6, 0.8) for i in range(31)]
    found = _verdicts(_verdict("tis", 0.9, 0.62, gain=0.2), _verdict(NOTHING, 0.6, 0.8), *others)
    assert summary(found)["best"].startswith(
        "not told: tis has the smallest error at its best length, 0.50 against"
    )
    assert (
        "a lead of 0.20 is within what chance gives the first of 32 (0.28)"
        in summary(found)["best"]
    )
    assert summary(_verdicts(_verdict(NOTHING, 0.6, 1.0)))["best"].startswith(
        "no remedy: none of them"
    )


def test_what_noise_hides_has_no_number_and_no_best():
    hidden = dataclasses.replace(
        _verdict(NOTHING, 0.6, 1.0), quality=quality(Moments(1.0, 0.5, -0.1, 1.0))
    )
    found = _verdicts(hidden)
    assert summary(found) == {
        "best": "not known: noise hides the exact engine's gradient itself; give more --batches or "
        "--prompts"
    }
    assert np.isnan(found.remedies[0].quality.error) and "not known" in table(found)

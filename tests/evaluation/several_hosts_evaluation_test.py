"""An evaluation of several hosts: each one's share, texts included, becomes one result."""

import dataclasses

import numpy as np

from dcmdp_jax.evaluation.average import COLUMNS, EvaluationResult, join


def test_texts_and_answers_of_all_hosts_come_in_order():
    shape = (3, 2)
    texts = np.array([["a", "b\n"], ["ü", ""], ["{", '"']], object)
    answers = np.array([["1", None], [None, None], ["x", "2"]], object)
    scores = np.arange(6, dtype=np.float32).reshape(shape)
    no = np.zeros(shape, bool)
    share = EvaluationResult(
        task="eval/t",
        scores=scores,
        lengths=np.ones(shape, np.int32),
        truncated=no,
        unparsed=no,
        texts=texts,
        answers=answers,
        unjudged={"verifier_timeouts": 1, "verifier_errors": 0, "verifier_over_budget": 0},
    )
    joined = join([share, share])
    assert joined.texts.tolist() == texts.tolist() * 2
    assert joined.answers.tolist() == answers.tolist() * 2
    assert joined.scores.tolist() == scores.tolist() * 2
    assert joined.unjudged["verifier_timeouts"] == 2
    empty = dataclasses.replace(share, **{name: getattr(share, name)[:0] for name in COLUMNS})
    assert join([empty, empty]).texts.shape == (0, 2)

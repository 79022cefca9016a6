"""An evaluation of several hosts: each one's share, texts included, becomes one result."""

import dataclasses

import numpy as np

from dcmdp_jax.evaluation.average import COLUMNS, EvaluationResult, join


def test_texts_and_answers_of_all_hosts_come_in_order():
    shape = (3, 2)
    texts = np.array([["a", "b\n"], ["ü", ""], ["{", '"']], object)
    found = np.array([["1", None], [None, None], ["x", "2"]], object)
    scores = np.arange(6, dtype=np.float32).reshape(shape)
    no = np.zeros(shape, bool)
    own = EvaluationResult(
        *("eval/t", scores, np.ones(shape, np.int32), no, no, texts, found),
        {"verifier_timeouts": 1, "verifier_errors": 0, "verifier_over_budget": 0},
    )
    whole = join([own, own])
    assert whole.texts.tolist() == texts.tolist() * 2 and whole.found.tolist() == found.tolist() * 2
    assert (
        whole.scores.tolist() == own.scores.tolist() * 2
        and whole.unjudged["verifier_timeouts"] == 2
    )
    nothing = dataclasses.replace(own, **{name: getattr(own, name)[:0] for name in COLUMNS})
    assert join([nothing, nothing]).texts.shape == (0, 2)

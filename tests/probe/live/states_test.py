"""Exact measures of whole states in the probe: float64 sums over the vocabulary, their bounds, and
the estimates.
"""

import jax
import numpy as np
import pytest

from dcmdp_jax.models import decoder
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.probe.columns.page import table
from tests.probe.live.planted_test import PROMPTS, analysis, local, sampled
from tests.support.tiny_model import CONFIG, params

V = CONFIG.vocab_size


@jax.jit
def _states(weights, ids):
    hidden = decoder.hidden_states(weights, CONFIG, decoder.unpacked_inputs(ids), Compute())
    return jax.nn.log_softmax(hidden @ decoder.output_kernel(weights))


def _log_p(prompt, completion):
    ids = np.zeros((1, 128), np.int32)
    total = len(prompt) + len(completion)
    ids[0, :total] = np.concatenate([prompt, completion])
    return np.asarray(_states(params(), ids), np.float64)[0, len(prompt) - 1 : total - 1]


def test_the_probe_has_exact_measures_beside_the_sampled_tokens_estimates():
    engine = local(precision="int8", top_logprobs=V)
    found = sampled(engine)
    states = zip(found.prompt_index, found.completion_ids, strict=True)
    log_p = np.concatenate([_log_p(PROMPTS[index], ids) for index, ids in states])
    log_q = np.zeros_like(log_p)
    np.put_along_axis(log_q, np.concatenate(found.top_ids), np.concatenate(found.top_logprobs), 1)
    p = np.exp(log_p)
    q = np.exp(log_q)
    exact = {
        "total variation": np.abs(p - q).sum(1) / 2,
        "KL(q || p), nats": (q * (log_q - log_p)).sum(1),
        "KL(p || q), nats": (p * (log_p - log_q)).sum(1),
        "expected |p - q|": (q * np.abs(p - q)).sum(1),
    }
    tokens = np.concatenate(found.completion_ids)[:, None]
    d, delta = (np.take_along_axis(x, tokens, 1)[:, 0] for x in (log_p - log_q, np.abs(p - q)))
    terms = np.abs(np.exp(d) - 1) / 2, -d, np.exp(d) * d, delta
    analyzed = analysis(engine, found, rescore=False)
    assert analyzed.states[-1].exact == pytest.approx(1, abs=1e-5)
    for one, (title, values), term in zip(analyzed.states[:-1], exact.items(), terms, strict=True):
        assert one.title == title and one.exact == pytest.approx(
            values.mean(), rel=1e-3, abs=1e-6
        ), title
        assert one.sampled == pytest.approx(term.mean(), rel=1e-3, abs=1e-6), title
        assert one.noise == pytest.approx(
            np.sqrt(np.mean((term - values) ** 2) / len(term)), rel=1e-3
        ), title
        assert abs(one.sampled - one.exact) < 5 * one.noise and one.exact > 1e-5, title
    assert "\ntotal variation  " in table([analyzed])

    engine = local(precision="int8", top_logprobs=4)
    found = sampled(engine)  # the same tokens
    headed = analysis(engine, found, rescore=False)
    mass = headed.states[-1].exact
    assert mass == pytest.approx(-np.sort(-q)[:, :4].sum(1).mean(), abs=1e-4) and mass < 0.99
    for one, values in zip(headed.states[:-1], exact.values(), strict=True):
        assert one.exact - 1e-6 < values.mean() < one.exact + one.bound + 1e-6, one.title

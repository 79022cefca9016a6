"""The engine's top-k tokens against the whole softmax, on a mesh, and refusals."""

import dataclasses

import jax
import numpy as np
import pytest

from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.protocol import EngineError, check_top_logprobs
from tests.engines import local_mesh_test
from tests.engines.local_engine_test import (
    QWEN3,
    SAMPLING,
    engine,
    log_softmax,
    logits_of,
    params,
    prompts,
)

NUMBERS = {"seed": 1, "step": 2}


def _states(episodes, config=QWEN3, temperature=0.8):
    """Log-probs [T, V] of each episode's sampled tokens' states by the training stack."""
    logits = logits_of(config, params(config), [episode.token_ids for episode in episodes])
    return [
        log_softmax(row[episode.prompt_length - 1 : len(episode.token_ids) - 1] / temperature)
        for row, episode in zip(logits, episodes, strict=True)
    ]


@pytest.mark.parametrize("k", [5, 40])
def test_they_are_those_of_the_whole_softmax(k):
    """The listed tokens are those of the softmax, also with k = V.

    Rows are preempted, moved and refilled on the way; the sampled token's entry is its log-prob.
    """
    made = engine(top_logprobs=k, max_rows=4, min_rows=2, cache_block=4)
    episodes = collect(made.generate(prompts(), SAMPLING, **NUMBERS))
    check_top_logprobs(episodes, k, 40)
    found = 0
    for episode, expected in zip(episodes, _states(episodes), strict=True):
        ids, values = (
            episode.columns[name][episode.sampled_mask] for name in ("top_ids", "top_logprobs")
        )
        order = np.argsort(-expected, axis=1)[:, :k]
        np.testing.assert_allclose(
            values, np.take_along_axis(expected, order, axis=1), rtol=0, atol=1e-4
        )
        np.testing.assert_allclose(
            values, np.take_along_axis(expected, ids, axis=1), rtol=0, atol=1e-4
        )
        token, place = np.nonzero(ids == episode.completion_ids[:, None])
        found += len(token)
        np.testing.assert_array_equal(
            values[token, place], episode.rollout_logprobs[episode.sampled_mask][token]
        )
    assert found == sum(e.num_sampled for e in episodes) if k == 40 else found > 20
    plain = collect(
        engine(max_rows=4, min_rows=2, cache_block=4).generate(prompts(), SAMPLING, **NUMBERS)
    )
    for one, other in zip(episodes, plain, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.rollout_logprobs, other.rollout_logprobs)
        assert "top_ids" not in other.columns


def test_a_nucleus_lists_what_it_samples_from_alone():
    sampling = dataclasses.replace(SAMPLING, top_p=0.6)
    for episode in collect(engine(top_logprobs=40).generate(prompts()[:2], sampling, **NUMBERS)):
        ids, values = (
            episode.columns[name][episode.sampled_mask] for name in ("top_ids", "top_logprobs")
        )
        np.testing.assert_allclose(np.where(ids >= 0, np.exp(values), 0).sum(axis=1), 1, atol=1e-5)
        assert (ids == -1).any(axis=1).all() and (ids == episode.completion_ids[:, None]).any(
            axis=1
        ).all()


def test_a_draw_of_the_k_top_k_lists_those_renormalized():
    """First top_k cuts, then the nucleus.

    top_k = 5, and of them a nucleus of 0.7. A shorter list is refused.
    """
    for top_p, sizes in ((1.0, {5}), (0.7, {1, 2, 3, 4, 5})):
        sampling = dataclasses.replace(SAMPLING, top_k=5, top_p=top_p)
        episodes = collect(engine(top_logprobs=8).generate(prompts(), sampling, **NUMBERS))
        check_top_logprobs(episodes, 8, 40, complete=True)
        for episode, expected in zip(episodes, _states(episodes), strict=True):
            ids, values = (
                episode.columns[name][episode.sampled_mask] for name in ("top_ids", "top_logprobs")
            )
            for row, found, state in zip(ids, values, expected, strict=True):
                order = np.argsort(-state)[:5]
                p = np.exp(state[order]) / np.exp(state[order]).sum()
                kept = order[: int(np.searchsorted(np.cumsum(p), top_p - 1e-6)) + 1][:5]
                assert set(row[row >= 0]) == set(kept) and len(kept) in sizes
                mass = np.exp(state[kept]).sum()
                np.testing.assert_allclose(
                    found[: len(kept)], state[row[: len(kept)]] - np.log(mass), atol=1e-4
                )
    short = collect(
        engine(top_logprobs=4).generate(
            prompts(), dataclasses.replace(SAMPLING, top_k=5), **NUMBERS
        )
    )
    with pytest.raises(
        EngineError, match=r"than it lists; set a larger number \(`top_logprobs` is \d, 0 asks"
    ):
        check_top_logprobs(short, 4, 40, complete=True)


@pytest.mark.skipif(
    jax.device_count() < 4, reason="needs several devices, see XLA_FLAGS in BUILD.md"
)
def test_a_split_vocabulary_lists_the_same():
    there = local_mesh_test
    one, split = (
        collect(
            there._engine(there.DENSE, mesh, top_logprobs=6).generate(
                there.PROMPTS, there.SAMPLING, **NUMBERS
            )
        )
        for mesh in (None, there._mesh(tensor=2, data=2))
    )
    for a, b in zip(one, split, strict=True):
        mask = a.sampled_mask
        np.testing.assert_allclose(
            a.columns["top_logprobs"][mask], b.columns["top_logprobs"][mask], rtol=0, atol=3e-5
        )
        assert (a.columns["top_ids"][mask] == b.columns["top_ids"][mask]).mean() > 0.99


def _changed(episode, name, change):
    values = episode.columns[name].copy()
    change(values[episode.prompt_length])
    return episode.with_columns(**{name: values})


def _entry(episode, value):
    """Sets the sampled token's entry of the list."""
    place = int(
        np.flatnonzero(
            episode.columns["top_ids"][episode.prompt_length] == episode.completion_ids[0]
        )[0]
    )

    def change(row):
        row[place] = value(row[place])

    return change


def test_what_can_not_be_is_refused_in_one_line():
    [episode, *_] = collect(engine(top_logprobs=40).generate(prompts()[:1], SAMPLING, **NUMBERS))
    cases = {
        "the listed tokens have a probability above 1": (
            "top_logprobs",
            lambda row: row.__setitem__(3, 0.1),
        ),
        "an id is listed twice": ("top_ids", lambda row: row.__setitem__(slice(38, 40), row[37])),
        "a listed id is outside 0 .. 39": ("top_ids", lambda row: row.__setitem__(39, 40)),
        "a listed log-prob is not finite": (
            "top_logprobs",
            lambda row: row.__setitem__(39, np.nan),
        ),
        "another log-prob in the list": ("top_logprobs", _entry(episode, lambda x: x - 0.5)),
    }
    for said, (name, change) in cases.items():
        with pytest.raises(
            EngineError, match=f"rollout: completion 0, token 0: .*{said}.*`top_logprobs`"
        ):
            check_top_logprobs([_changed(episode, name, change)], 40, 40)
    short = episode.with_columns(
        **{name: episode.columns[name][:, :4] for name in ("top_ids", "top_logprobs")}
    )
    least = short.columns["top_logprobs"][short.prompt_length].min()
    likely = short.rollout_logprobs.copy()
    likely[short.prompt_length] = least + 0.5
    others = [t for t in range(5) if t != episode.completion_ids[0]][:4]
    likelier = short.with_columns(rollout_logprobs=likely)
    lacking = _changed(likelier, "top_ids", lambda row: row.__setitem__(slice(None), others))
    with pytest.raises(
        EngineError, match="lacks the sampled token, which is likelier than its last"
    ):
        check_top_logprobs([lacking], 4, 40)
    with pytest.raises(
        EngineError, match=r"top-k tokens of shape \(\d+, 4\), expected \[tokens, k\]"
    ):
        check_top_logprobs([short], 40, 40)
    with pytest.raises(EngineError, match="completion 0: no top-k tokens"):
        check_top_logprobs([dataclasses.replace(episode, columns={})], 40, 40)

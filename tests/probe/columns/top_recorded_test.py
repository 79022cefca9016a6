"""The engine's top-k tokens in a recording of another trainer: what comes back, its size, and
one k.
"""

import json

import numpy as np
import pytest

from dcmdp_jax.algorithm.distribution import state_measures
from dcmdp_jax.commands import probe
from dcmdp_jax.record import (
    Recorder,
    packed_top,
    record_skyrl,
    record_trl,
    record_verl,
    unpacked_top,
)
from tests.support.commands import failed_command, run_command

N = 3
T = 40
K = 16


def _lists(k=K):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (N, T, 100))
    p, q = (
        z - np.log(np.exp(z).sum(-1, keepdims=True))
        for z in (logits, logits + rng.normal(0, 0.1, logits.shape))
    )
    ids = np.argsort(-q, axis=-1)[..., :k]
    return ids, *(np.take_along_axis(x, ids, -1) for x in (p, q))


def _write(recorder, lists, step=0):
    ids, train, rollout = (values[..., 0] for values in lists)
    recorder.write(step, np.maximum(ids, 0), train, rollout, top=lists)


def test_lists_come_back_to_half_precision_of_their_differences(tmp_path):
    lists = _lists()
    lists[0][1, :, 10:] = -1
    _write(Recorder(tmp_path, "trl"), lists)
    lines = [
        json.loads(line) for line in (tmp_path / "step_0/rank_0.jsonl").read_text().splitlines()
    ]
    for row, line in enumerate(lines):
        ids, train, rollout = unpacked_top(line["top"])
        there = ids >= 0
        np.testing.assert_array_equal(ids, lists[0][row])
        assert (rollout[~there] == 0).all() and there.sum() == T * (10 if row == 1 else K)
        gap = np.abs(lists[1][row] - lists[2][row])[there]
        assert (
            np.abs(rollout - lists[2][row])[there] <= 2**-11 * np.abs(lists[2][row])[there] + 1e-6
        ).all()
        assert (
            np.abs((train - rollout) - (lists[1] - lists[2])[row])[there] <= 2**-11 * gap + 2e-6
        ).all()
        assert len(json.dumps(line["top"])) < 11 * K * T + 200
        # An exact measure of the recording is that of the run to what half precision leaves.
        kept = np.where(there, 1.0, 0.0)
        measured = state_measures(train, rollout, there)
        exact = (
            np.exp(lists[2][row]) * np.abs(np.exp(lists[1][row]) - np.exp(lists[2][row])) * kept
        ).sum(-1)
        np.testing.assert_allclose(
            measured["distribution/expected_discrepancy"], exact, rtol=0.02, atol=1e-6
        )


def test_a_recording_has_one_k(tmp_path):
    recorder = Recorder(tmp_path, "trl")
    _write(recorder, _lists())
    with pytest.raises(
        ValueError, match=r"^top is \[\[3, 40, 8\], .*: this recording began with k=16$"
    ):
        _write(recorder, _lists(8), step=1)
    ids, train, rollout = _lists()
    with pytest.raises(ValueError, match=r"^top is .*: expected \[3, 40, 16\] for all$"):
        recorder.write(
            1, ids[..., 0], train[..., 0], rollout[..., 0], top=(ids, train[..., :4], rollout)
        )


def test_the_probe_reads_the_lists_of_a_recording(tmp_path, capsys):
    """Expected |p - q| over 16 of 100 tokens in float64, and its bound; half precision leaves
    2%.
    """
    lists = _lists()
    _write(Recorder(tmp_path, "trl"), lists)
    code, output, errors = run_command(
        probe.main, "probe", capsys, tmp_path, "--out", tmp_path / "out"
    )
    assert (code, errors) == (0, "") and "whole distributions" in output
    [pair] = json.loads((tmp_path / "out/probe.json").read_text())["pairs"]
    p = np.exp(lists[1])
    q = np.exp(lists[2])
    found = {each["title"]: each for each in pair["states"]}
    assert found["expected |p - q|"]["exact"] == pytest.approx(
        (q * np.abs(p - q)).sum(-1).mean(), rel=0.02
    )
    assert found["expected |p - q|"]["sampled"] == pytest.approx(
        np.abs(p - q)[..., 0].mean(), rel=1e-4
    )
    assert found["mass of the engine's top 16 tokens"]["exact"] == pytest.approx(
        q.sum(-1).mean(), rel=1e-3
    )
    assert "<h3>Whole distributions" in (tmp_path / "out/probe.html").read_text()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda top: top | {"k": 7}, "must be lists as dcmdp_jax.record.packed_top packs them"),
        (lambda top: top | {"ids": "@"}, "must be lists as dcmdp_jax.record.packed_top packs them"),
        (
            lambda top: packed_top(*(x[:9] for x in unpacked_top(top))),
            "top has 9 entries, there are 40 tokens",
        ),
        (
            lambda top: packed_top(*(x[:, :8] for x in unpacked_top(top))),
            "lists of 8 and 16 top-k tokens",
        ),
        (
            lambda top: packed_top(*unpacked_top(top)[:2], 0 * unpacked_top(top)[2]),
            "have a probability of 16 together",
        ),
        (
            lambda top: packed_top(0 * unpacked_top(top)[0], *unpacked_top(top)[1:]),
            "an id is listed twice",
        ),
        (
            lambda top: packed_top(unpacked_top(top)[0] + 100, *unpacked_top(top)[1:]),
            "lacks the sampled token, which",
        ),
        (
            lambda top: packed_top(*unpacked_top(top)[:2], unpacked_top(top)[2] - 0.1),
            "as raw ones beside processed",
        ),
    ],
)
def test_lists_that_can_not_be_are_one_line(tmp_path, capsys, change, line):
    _write(Recorder(tmp_path, "trl"), _lists())
    path = tmp_path / "step_0/rank_0.jsonl"
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    rows[1]["top"] = change(rows[1]["top"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert line in failed_command(probe.main, "probe", capsys, tmp_path, "--out", tmp_path / "out")


@pytest.mark.parametrize("framework", ["trl", "verl", "skyrl"])
def test_the_recorders_of_frameworks_take_lists_beside_their_batch(tmp_path, framework):
    """At the places of the completion's tokens; two that are masked in front, and one behind, go
    with their tokens.
    """
    lists = _lists()
    ids, train, rollout = (x[..., 0] for x in lists)
    mask = np.ones((N, T), int)
    mask[:, :2], mask[:, -1:] = 0, 0
    advantages = np.zeros((N, T))
    recorder = Recorder(tmp_path, framework)
    if framework == "trl":
        names = (
            "completion_ids",
            "old_per_token_logps",
            "sampling_per_token_logps",
            "completion_mask",
            "advantages",
        )
        record_trl(
            recorder,
            0,
            dict(zip(names, (ids, train, rollout, mask, advantages), strict=True)),
            top=lists,
        )
    elif framework == "verl":
        names = "responses", "old_log_probs", "rollout_log_probs", "response_mask"
        record_verl(
            recorder, 0, dict(zip(names, (ids, train, rollout, mask), strict=True)), top=lists
        )
    else:
        names = "action_log_probs", "rollout_logprobs", "loss_mask", "advantages", "sequences"
        whole = np.concatenate([np.full((N, 5), 7), ids], axis=1)  # behind the prompts
        record_skyrl(
            recorder,
            0,
            dict(zip(names, (train, rollout, mask, advantages, whole), strict=True)),
            top=lists,
        )
    for row, text in enumerate((tmp_path / "step_0/rank_0.jsonl").read_text().splitlines()):
        line = json.loads(text)
        np.testing.assert_array_equal(line["token_ids"], ids[row, 2:-1])
        np.testing.assert_array_equal(unpacked_top(line["top"])[0], lists[0][row, 2:-1])

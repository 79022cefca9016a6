"""The engine's likeliest tokens in a recording of another trainer: what comes back, its size, and one k."""

import json

import numpy as np
import pytest

from dcmdp_jax.algorithm.distribution import state_measures
from dcmdp_jax.record import Recorder, unpacked_top

N, T, K = 3, 40, 16


def _lists(k=K):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (N, T, 100))
    p, q = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (logits, logits + rng.normal(0, 0.1, logits.shape)))
    ids = np.argsort(-q, axis=-1)[..., :k]
    return ids, *(np.take_along_axis(x, ids, -1) for x in (p, q))


def _write(recorder, lists, step=0):
    ids, train, rollout = (values[..., 0] for values in lists)
    recorder.write(step, np.maximum(ids, 0), train, rollout, top=lists)


def test_lists_come_back_to_half_precision_of_their_differences(tmp_path):
    lists = _lists()
    lists[0][1, :, 10:] = -1
    _write(Recorder(tmp_path, "trl"), lists)
    lines = [json.loads(line) for line in (tmp_path / "step_0/rank_0.jsonl").read_text().splitlines()]
    for row, line in enumerate(lines):
        ids, train, rollout = unpacked_top(line["top"])
        there = ids >= 0
        np.testing.assert_array_equal(ids, lists[0][row])
        assert (rollout[~there] == 0).all() and there.sum() == T * (10 if row == 1 else K)
        gap = np.abs(lists[1][row] - lists[2][row])[there]
        assert (np.abs(rollout - lists[2][row])[there] <= 2**-11 * np.abs(lists[2][row])[there] + 1e-6).all()
        assert (np.abs((train - rollout) - (lists[1] - lists[2])[row])[there] <= 2**-11 * gap + 2e-6).all()
        assert len(json.dumps(line["top"])) < 11 * K * T + 200
        # An exact measure of the recording is that of the run to what half precision leaves.
        kept, measured = np.where(there, 1.0, 0.0), state_measures(train, rollout, there)
        exact = (np.exp(lists[2][row]) * np.abs(np.exp(lists[1][row]) - np.exp(lists[2][row])) * kept).sum(-1)
        np.testing.assert_allclose(measured["expected_discrepancy"], exact, rtol=0.02, atol=1e-6)


def test_a_recording_has_one_k(tmp_path):
    recorder = Recorder(tmp_path, "trl")
    _write(recorder, _lists())
    with pytest.raises(ValueError, match=r"^top is \[\[3, 40, 8\], .*: this recording began with k=16$"):
        _write(recorder, _lists(8), step=1)
    ids, train, rollout = _lists()
    with pytest.raises(ValueError, match=r"^top is .*: expected \[3, 40, 16\] for all$"):
        recorder.write(1, ids[..., 0], train[..., 0], rollout[..., 0], top=(ids, train[..., :4], rollout))

"""A study's kept metrics: what is read is what was written, to nine digits."""

import gzip
import json

import numpy as np
import pytest

from dcmdp_jax.errors import UserError
from research.studies.results import read_kept_metrics, tables, write_kept_metrics

_REWARD = "reward/mean"
_SCORE = "eval/arithmetic/avg@8"


def _series(scale):
    steps = np.arange(1, 4)
    return {
        _REWARD: (steps, scale * np.array([0.1, 0.1234567891, np.nan])),
        _SCORE: (np.array([0, 3]), np.array([0.25, 0.5])),
        "time/step": (steps, np.ones(3)),
    }


def test_what_is_read_is_what_a_study_compares(tmp_path):
    path = tmp_path / "metrics.jsonl.gz"
    runs = {"grpo": {0: _series(1.0), 3: _series(2.0)}, "dc_grpo": {0: _series(3.0)}}
    write_kept_metrics(path, runs)
    found = read_kept_metrics(path, ["grpo", "dc_grpo", "unused"])
    assert list(found) == ["grpo", "dc_grpo", "unused"] and not found["unused"]
    assert set(found["grpo"][3]) == {_REWARD, _SCORE}  # times are not kept
    steps, values = found["grpo"][3][_REWARD]
    assert steps.tolist() == [1, 2, 3] and steps.dtype == np.int64
    np.testing.assert_array_equal(values, [0.2, 0.246913578, np.nan])
    assert tables("T", {arm: found[arm] for arm in runs}, "grpo", []) == tables(
        "T", runs, "grpo", []
    )


def test_equal_metrics_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        write_kept_metrics(tmp_path / name, {"grpo": {0: _series(1.0)}})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    first = json.loads(gzip.decompress((tmp_path / "a").read_bytes()).splitlines()[0])
    assert first == {"arm": "grpo", "seed": 0, "step": 0, _SCORE: 0.25}


@pytest.mark.parametrize(
    "compress, text, message",
    [
        (bytes, b"no gzip", "can't be read as gzipped JSON lines"),
        (gzip.compress, b"[1]", "line 1: must be an object with arm, seed, step and metrics"),
        (
            gzip.compress,
            b'{"arm": "ppo", "seed": 0, "step": 1}',
            "arm 'ppo' is none of the study's: grpo, dc_grpo",
        ),
        (gzip.compress, b'{"arm": "grpo", "seed": 0}', "line 1: must be an object with arm"),
    ],
)
def test_a_file_that_is_no_study_is_one_line(compress, text, message, tmp_path):
    path = tmp_path / "kept"
    path.write_bytes(compress(text))
    with pytest.raises(UserError, match=message.replace("(", r"\(")) as failure:
        read_kept_metrics(path, ["grpo", "dc_grpo"])
    assert "\n" not in str(failure.value)

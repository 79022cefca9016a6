"""A resumed run whose model was written anew goes on with its own weights, and says so."""

import os
from datetime import UTC, datetime

import pytest

from dcmdp_jax.training.start import _warn_of_changed_model

_BEGAN = datetime(2026, 11, 29, 12, tzinfo=UTC)


@pytest.mark.parametrize(("seconds", "warns"), [(-1, False), (1, True)])
def test_weights_that_are_newer_than_the_run_are_named(seconds, warns, tmp_path, caplog):
    shards = [tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"]
    for shard, age in zip(shards, (-100, seconds), strict=True):
        shard.write_bytes(b"")
        os.utime(shard, times=(0, _BEGAN.timestamp() + age))
    # Written beside the weights by whoever looks at them: no other model.
    (tmp_path / "notes.txt").write_text("newer than the run")
    _warn_of_changed_model(tmp_path, _BEGAN)
    expected = []
    if warns:
        expected = [
            f"{tmp_path} has changed since this run began, which goes on with its own weights; "
            "another run_dir begins with the new ones"
        ]
    assert [record.getMessage() for record in caplog.records] == expected

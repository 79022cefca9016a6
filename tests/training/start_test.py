"""A resumed run whose model was written anew goes on with its own weights, and says so."""

import os
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest import mock

import pytest

from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.run.checkpoint import Checkpoints
from dcmdp_jax.training.start import _warn_of_changed_model, start
from dcmdp_jax.training.state import initial_dual
from dcmdp_jax.types import TrainState

_BEGAN = datetime(2001, 11, 29, 12, tzinfo=UTC)


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


def test_a_resumed_run_looks_at_its_model(tmp_path, caplog):
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = from_config_dict({"task": {"train": "x"}, "model": {"path": str(tmp_path)}})
    dual = initial_dual(config.algorithm)
    state = TrainState(step=3, params={}, opt_state=(), dual=dual, skipped_in_row=0)
    checkpoints = mock.Mock(spec=Checkpoints)
    checkpoints.restore.return_value = state
    checkpoints.prompts_taken.return_value = 12
    task = SimpleNamespace(config=config, model=None, started=_BEGAN)
    run = SimpleNamespace(task=task, weights=None)
    resumed = start(
        run,
        SimpleNamespace(arguments=(state,)),
        checkpoints,
        stop=None,
        check=lambda: None,
        show=lambda line: None,
    )
    assert (resumed.resumed, resumed.prompts_taken) == (True, 12)
    [record] = caplog.records
    assert record.getMessage().startswith(f"{tmp_path} has changed since this run began")

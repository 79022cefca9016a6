"""Checkpoints: the same bits back, only the kept ones on disk, damage found out and stepped
over.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dcmdp_jax.algorithm.dual import dual_init, dual_update
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import param_shapes
from dcmdp_jax.models.rope import RopeScaling
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run import checkpoint
from dcmdp_jax.run.checkpoint import CheckpointError, Checkpoints, PolicyScore, digests
from dcmdp_jax.run.weights import find_params
from dcmdp_jax.training.state import new_state
from dcmdp_jax.types import LossScale, TrainState
from tests.support.our_log import our_log
from tests.support.waiting import wait_until

_MODEL = ModelConfig(
    "qwen3",
    24,
    16,
    32,
    2,
    2,
    1,
    8,
    rope_scaling=RopeScaling("linear", factor=2.0),
    max_position_embeddings=64,
)
_OPTIMIZER = optax.adamw(1e-3)


@jax.jit
def _after_an_update(step, params):
    state = new_state(params, _OPTIMIZER, dual_init(0.1, tolerance=0.01))
    updates, opt_state = _OPTIMIZER.update(params, state.opt_state, params)
    dual = state.dual._replace(
        multiplier=dual_update(state.dual.multiplier, 0.02 * step, tolerance=0.01)
    )
    params = optax.apply_updates(params, updates)
    return TrainState(step, params, opt_state, dual, skipped_in_row=step % 2)


@functools.cache
def _state(step=3, dtype="float32"):
    """A state no leaf of which is at its initial value; different for every step."""
    random = np.random.default_rng(step)
    shapes = param_shapes(_MODEL, dtype)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), shapes
    )
    return _after_an_update(jnp.int32(step), params)


def _abstract(state):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), state
    )


def _same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def opened(tmp_path):
    """Open the checkpoints of tmp_path; all are closed at the end."""
    made = []

    def open_(keep_last=2, keep_best=0):
        for earlier in made:
            earlier.close()
        made.append(Checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best))
        return made[-1]

    yield open_
    for checkpoints in made:
        checkpoints.close()


def _saved(opened, *steps, **options):
    checkpoints = opened(**options)
    for step in steps:
        checkpoints.save(step, _state(step), model=_MODEL)
    checkpoints.wait()
    return checkpoints


def _scored(checkpoints, step, score, name="eval"):
    """Save a step as an evaluated one is: the state, then its score if it has one."""
    checkpoints.save(step, _state(step), model=_MODEL)
    if score is not None:
        checkpoints.add_score(step, PolicyScore(name, score))
    checkpoints.wait()


def _on_disk(tmp_path):
    return sorted(
        int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()
    )


def test_a_loss_scale_and_the_prompts_taken_come_back(opened):
    state = _state()._replace(loss_scale=LossScale(jnp.float32(512), jnp.int32(7)))
    checkpoints = opened()
    checkpoints.save(3, state, model=_MODEL, prompts_taken=57)
    checkpoints.save(4, _state(4), model=_MODEL)
    checkpoints.wait()
    _same_bits(opened().restore(_abstract(_state(4)), _MODEL), _state(4))
    checkpoints = opened()
    assert (checkpoints.prompts_taken(3), checkpoints.prompts_taken(4)) == (57, None)
    checkpoints._manager.delete(4)
    _same_bits(checkpoints.restore(_abstract(state), _MODEL), state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit(opened, dtype):
    state = _state(dtype=dtype)
    checkpoints = opened()
    checkpoints.save(3, state, model=_MODEL)
    checkpoints.add_score(3, PolicyScore("eval", 0.5))
    restored = opened().restore(_abstract(state), _MODEL)
    _same_bits(state, restored)
    # What a careless checkpoint forgets: moments, their count, the multiplier.
    assert int(restored.opt_state[0].count) == 1
    assert float(restored.dual.multiplier) == pytest.approx(0.15, abs=1e-7)  # 0.1 + (0.06 - 0.01)


def test_what_is_saved_is_the_state_at_the_call_even_if_its_buffers_are_donated(opened):
    kept = jax.tree.map(np.array, _state())
    state = jax.tree.map(jnp.array, kept)
    checkpoints = opened()
    checkpoints.save(3, state, model=_MODEL)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + leaf.dtype.type(1), tree), donate_argnums=0
    )
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    _same_bits(kept, opened().restore(_abstract(kept), _MODEL))


def test_a_sharded_state_restores_onto_other_devices_with_the_same_bits(opened):
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4])
    state = _state()
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = jax.tree.map(lambda leaf: split if leaf.shape[:1] == (24,) else whole, state)
    sharded = jax.device_put(state, shardings)
    assert digests(sharded.params) == digests(state.params)
    checkpoints = opened()
    checkpoints.save(3, sharded, model=_MODEL)
    checkpoints.wait()
    _same_bits(state, opened().restore(_abstract(state), _MODEL))


def test_an_empty_run_has_nothing_to_restore(opened):
    assert opened().restore(_abstract(_state()), _MODEL) is None


def test_the_newest_is_restored_and_the_last_few_are_kept(opened, tmp_path):
    _saved(opened, 1, 2, 3, 4, keep_last=2)
    assert _on_disk(tmp_path) == [3, 4]
    _same_bits(_state(4), opened().restore(_abstract(_state()), _MODEL))


def test_the_best_are_kept_beside_the_last(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=2)
    # Step 3 has no score: no candidate, whatever the others have.
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.1), (6, 0.3)):
        _scored(checkpoints, step, score)
    checkpoints.close()
    assert _on_disk(tmp_path) == [2, 4, 6]


def test_of_equal_scores_the_newer_is_the_best(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.5), (2, 0.5), (3, 0.1)):
        _scored(checkpoints, step, score)
    checkpoints.close()
    assert _on_disk(tmp_path) == [2, 3]


def test_a_loss_that_is_not_a_number_is_never_the_best(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    # Sorted as it is, NaN would be the highest, and step 2 deleted.
    for step, score in ((1, -1.4), (2, -1.2), (3, float("nan")), (4, float("nan"))):
        _scored(checkpoints, step, score)
    checkpoints.close()
    assert _on_disk(tmp_path) == [2, 4]


def test_the_best_are_still_known_after_a_restart(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.9), (2, 0.2)):
        _scored(checkpoints, step, score)
    checkpoints = opened(keep_last=1, keep_best=1)
    _scored(checkpoints, 3, 0.5)
    checkpoints.close()
    assert _on_disk(tmp_path) == [1, 3]


def test_a_score_that_comes_after_a_restart_counts(opened, tmp_path):
    """The policy was saved by a run that ended before its evaluation; the next run scores it."""
    checkpoints = opened(keep_last=1, keep_best=1)
    _scored(checkpoints, 1, None)
    checkpoints = opened(keep_last=1, keep_best=1)
    checkpoints.add_score(1, PolicyScore("eval", 0.9))
    for step, score in ((2, 0.2), (3, 0.5)):
        _scored(checkpoints, step, score)
    assert _on_disk(tmp_path) == [1, 3]
    record = tmp_path / "checkpoints" / "1" / "metrics" / "metrics"
    saved = json.loads(record.read_text())
    assert (saved["name"], saved["score"], saved["step"]) == ("eval", 0.9, 1)


def test_a_later_score_replaces_an_earlier_one(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.9), (2, 0.5)):
        _scored(checkpoints, step, score)
    checkpoints.add_score(1, PolicyScore("eval", 0.1))
    _scored(checkpoints, 3, 0.2)
    assert _on_disk(tmp_path) == [2, 3]


def test_a_step_is_saved_once(opened):
    checkpoints = _saved(opened, 3)
    checkpoints.save(3, _state(5), model=_MODEL)
    checkpoints.wait()
    _same_bits(_state(3), opened().restore(_abstract(_state()), _MODEL))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run directory with the checkpoints of steps 1 and 2, to be copied."""
    base = tmp_path_factory.mktemp("template")
    checkpoints = Checkpoints(base, keep_last=2, keep_best=0)
    for step in (1, 2):
        checkpoints.save(step, _state(step), model=_MODEL)
    checkpoints.close()
    return base


@pytest.fixture
def two(template, tmp_path):
    """tmp_path with the checkpoints of steps 1 and 2; their directory."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoints"


def _largest(directory):
    return max(
        (path for path in directory.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )


def _truncate(directory):
    path = _largest(directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip(directory):
    path = _largest(directory)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def _delete(directory):
    _largest(directory).unlink()


def _delete_item(directory):
    shutil.rmtree(directory)


_DAMAGES = [_truncate, _flip, _delete, _delete_item]


@pytest.mark.parametrize("item", ["params", "learner", "meta"])
@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    opened, two, caplog, damage, item
):
    damage(two / "2" / item)
    with caplog.at_level(logging.WARNING):
        checkpoints = opened()
        restored = checkpoints.restore(_abstract(_state()), _MODEL)
    _same_bits(_state(1), restored)
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "dcmdp_jax.run.checkpoint"
    ]
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith(f"checkpoint 2 of {two} is damaged (") and "pybind" not in said[0]
    assert (two / "damaged" / "2-1").is_dir()


def test_a_run_goes_on_after_damage_and_saves_the_damaged_step_again(opened, two):
    _flip(two / "2" / "params")
    checkpoints = opened()
    assert int(checkpoints.restore(_abstract(_state()), _MODEL).step) == 1
    checkpoints.save(2, _state(2), model=_MODEL)
    checkpoints.wait()
    _same_bits(_state(2), opened().restore(_abstract(_state()), _MODEL))
    _flip(two / "2" / "params")
    assert int(opened().restore(_abstract(_state()), _MODEL).step) == 1
    assert sorted(path.name for path in (two / "damaged").iterdir()) == ["2-1", "2-2"]


def test_when_all_are_damaged_that_is_an_error_and_nothing_is_touched(opened, two):
    for step in (1, 2):
        _flip(two / str(step) / "params")
    with pytest.raises(CheckpointError) as raised:
        opened().restore(_abstract(_state()), _MODEL)
    line = str(raised.value)
    assert line.startswith(f"{two}: none of the checkpoints [1, 2] can be read (2: ")
    assert "\n" not in line
    assert _on_disk(two.parent) == [1, 2] and not (two / "damaged").exists()


def test_a_checkpoint_of_another_model_is_named_and_left_alone(opened, two):
    with pytest.raises(CheckpointError) as raised:
        opened().restore(_abstract(_state()), dataclasses.replace(_MODEL, intermediate_size=7))
    assert str(raised.value) == (
        f"{two}/2: its model has intermediate_size={_MODEL.intermediate_size}, this config's has "
        "7; choose another run_dir"
    )
    assert _on_disk(two.parent) == [1, 2]


def test_a_newest_step_without_parameters_is_named_not_passed_over(two):
    shutil.rmtree(two / "2" / "params")
    with pytest.raises(CheckpointError) as raised:
        find_params(two.parent)
    assert str(raised.value) == f"{two}/2: damaged (params is missing); choose another step"
    assert find_params(two.parent, 1).step == 1


def test_no_room_for_the_state_is_no_damage(opened, two, monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(checkpoint, "check_digests", full)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        opened().restore(_abstract(_state()), _MODEL)
    assert _on_disk(two.parent) == [1, 2] and not (two / "damaged").exists()


def test_a_damaged_score_costs_the_score_alone(opened, tmp_path, caplog):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.9), (2, 0.2)):
        _scored(checkpoints, step, score)
    path = tmp_path / "checkpoints" / "2" / "metrics" / "metrics"
    path.write_bytes(b"")
    checkpoints = opened(keep_last=1, keep_best=1)
    assert our_log(caplog) == [
        f"{path.parent} is damaged: that checkpoint is no longer a candidate for the best"
    ]
    _same_bits(_state(2), checkpoints.restore(_abstract(_state()), _MODEL))
    _scored(checkpoints, 3, 0.5)
    checkpoints.close()
    assert _on_disk(tmp_path) == [1, 3]


def _directory_in_place(path):
    path.unlink()
    path.mkdir()


def _file_in_place(path):
    shutil.rmtree(path.parent)
    path.parent.write_text("")


_SPOILT = [
    *(
        b'{"scorf": 0.5}',
        b"3",
        b'"x"',
        b"null",
        b"[]",
        b'{"name": "eval", "score": "0.2"}',
        b"\xff",
        b"[" * 9999,
    ),
    *(_directory_in_place, _file_in_place),
    # The digit is another one; the score is another checkpoint's.
    lambda path: path.write_bytes(path.read_bytes().replace(b"0.2", b"0.9")),
    lambda path: shutil.copy(path.parents[2] / "1" / "metrics" / "metrics", path),
]


@pytest.mark.parametrize("opens_again", [True, False])
@pytest.mark.parametrize("spoil", _SPOILT, ids=map(str, range(len(_SPOILT))))
def test_a_spoilt_score_is_no_score_and_later_saves_go_on(opened, tmp_path, spoil, opens_again):
    """Between runs and while one runs. With 0.9 for 0.2, or step 1's own score, step 2 would be the
    best.
    """
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.7), (2, 0.2)):
        _scored(checkpoints, step, score)
    path = tmp_path / "checkpoints" / "2" / "metrics" / "metrics"
    path.write_bytes(spoil) if isinstance(spoil, bytes) else spoil(path)
    checkpoints = opened(keep_last=1, keep_best=1) if opens_again else checkpoints
    _scored(checkpoints, 3, 0.1)
    _scored(checkpoints, 4, None)
    checkpoints.close()
    assert _on_disk(tmp_path) == [1, 4]


def test_a_score_without_its_checksum_is_damaged(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, score in ((1, 0.2), (2, 0.1)):
        _scored(checkpoints, step, score)
    (tmp_path / "checkpoints" / "1" / "metrics" / "metrics").write_text(
        '{"name": "eval", "score": 0.2}'
    )
    checkpoints = opened(keep_last=1, keep_best=1)
    _scored(checkpoints, 3, 0.15)
    checkpoints.close()
    # As step 3 is saved step 2 has the best score that counts; 0.2 would have kept step 1 in its
    # place.
    assert _on_disk(tmp_path) == [2, 3]


def test_a_checkpoint_under_another_number_is_not_taken_for_that_one(opened, two, tmp_path, caplog):
    """Renamed upwards, Orbax would decline every later save; an older one under the newest number
    would be exported.
    """
    shutil.move(two / "2", two / "999")
    with pytest.raises(CheckpointError, match=r"999: damaged \(it was saved as that of step 2\)"):
        find_params(tmp_path)
    checkpoints = opened()
    _same_bits(checkpoints.restore(_abstract(_state()), _MODEL), _state(1))
    assert "checkpoint 999 of" in caplog.text and "it was saved as that of step 2" in caplog.text
    checkpoints.save(3, _state(3), model=_MODEL)
    checkpoints.wait()
    _same_bits(opened().restore(_abstract(_state()), _MODEL), _state(3))
    with pytest.raises(CheckpointError, match="3 is later than step 2, which is not saved"):
        opened().save(2, _state(2), model=_MODEL)


def test_a_checkpoint_without_a_field_that_has_a_default_is_read(opened):
    """What an earlier version, or a run without float16, saved: `training.start` gives the field
    its first value.
    """
    _saved(opened, 3)
    now = _state(3)._replace(loss_scale=LossScale(jnp.float32(512), jnp.int32(7)))
    _same_bits(opened().restore(_abstract(now), _MODEL), _state(3))


def test_a_difference_of_structure_is_named_and_is_no_damage(opened, two):
    shorter = _state(2)._replace(opt_state=_state(2).opt_state[1:])
    with pytest.raises(CheckpointError) as raised:
        opened().restore(_abstract(shorter), _MODEL)
    assert str(raised.value).startswith(
        f"{two}/2: has learner['opt_state'][0].count, which this run does not have (config.opt"
    )
    checkpoints = opened()
    scaled = _state(3)._replace(loss_scale=LossScale(jnp.float32(512), jnp.int32(7)))
    checkpoints.save(3, scaled, model=_MODEL)
    checkpoints.wait()
    with pytest.raises(
        CheckpointError,
        match=r"3: has learner\['loss_scale'\].* \(model.compute_dtype=float16\); nothing is dam",
    ):
        opened().restore(_abstract(_state()), _MODEL)
    assert _on_disk(two.parent) == [2, 3] and not (two / "damaged").exists()


def test_other_problems_than_the_run_began_with_are_refused_or_said(tmp_path, caplog):
    def opened(problems):
        return Checkpoints(tmp_path, keep_last=2, keep_best=0, problems=problems)

    with contextlib.closing(opened("10, 0a")) as checkpoints:
        checkpoints.save(3, _state(3), model=_MODEL)
    with contextlib.closing(opened("10, 0a")) as checkpoints:
        checkpoints.check_problems(3, may_change=False)
    with contextlib.closing(opened("14, 0b")) as checkpoints:
        with pytest.raises(
            CheckpointError,
            match="has 14, 0b .*, the run began with 10, 0a .*on_changed_data=continue",
        ):
            checkpoints.check_problems(3, may_change=False)
        assert our_log(caplog) == []
        checkpoints.check_problems(3, may_change=True)
        assert "the run began with 10, 0a" in our_log(caplog)[0]


def test_scores_of_another_evaluation_do_not_compete(opened, tmp_path):
    checkpoints = opened(keep_last=1, keep_best=1)
    for step, name, score in ((1, "easy", 0.9), (2, "hard", 0.2), (3, "hard", 0.1)):
        _scored(checkpoints, step, score, name)
    checkpoints.close()
    assert _on_disk(tmp_path) == [2, 3]


def test_a_digest_by_hand():
    # Bits times odd numbers by flat index: 5 * 1 + 6 * 3 + 7 * 5 + 8 * 7; a scalar's is its own
    # bits.
    tree = {"a": jnp.array([[5, 6], [7, 8]], jnp.int32), "b": jnp.float32(1.0)}
    assert digests(tree) == {"['a']": 114, "['b']": 0x3F800000}


def test_a_digest_gathers_nothing():
    mesh = make_mesh(fsdp=-1)
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    leaf = jax.device_put(jnp.ones((16, 64)), sharding)
    assert "all-gather" not in checkpoint._digests.lower({"a": leaf}).compile().as_text()


def test_what_a_killed_save_left_is_neither_read_nor_kept(opened, two, tmp_path):
    half = two / "3.orbax-checkpoint-tmp"
    shutil.copytree(two / "2", half)
    _truncate(half / "params")
    assert find_params(tmp_path).path == two / "2"
    _same_bits(_state(2), opened().restore(_abstract(_state()), _MODEL))
    wait_until(lambda: not half.exists(), "the library to remove it")  # in a thread of its own


def test_parameters_can_be_had_alone_by_any_path_to_them(two, tmp_path, caplog):
    for path, step, expected in (
        (tmp_path, None, 2),
        (str(two), None, 2),
        (tmp_path, 1, 1),
        (two / "1", None, 1),
    ):
        found = find_params(path, step)
        _same_bits(_state(expected).params, found.load())
        assert (found.model, found.step, found.tokenizer) == (
            _MODEL,
            expected,
            tmp_path / "tokenizer",
        )
    # What a library warns of here would stand on the screen of every evaluation.
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []


def test_bfloat16_parameters_come_back_as_bfloat16(opened, tmp_path):
    state = _state(dtype="bfloat16")
    checkpoints = opened()
    checkpoints.save(3, state, model=_MODEL)
    checkpoints.close()
    _same_bits(state.params, find_params(tmp_path).load())


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("item", ["params", "meta"])
def test_damaged_parameters_are_an_error_that_names_the_checkpoint(two, tmp_path, damage, item):
    damage(two / "2" / item)
    with pytest.raises(CheckpointError) as raised:
        find_params(tmp_path, 2).load()
    line = str(raised.value)
    assert (
        line.startswith((f"{two}/2: damaged (", f"{two}: no checkpoint of step 2"))
        and "\n" not in line
    )
    _same_bits(_state(1).params, find_params(tmp_path, 1).load())


def test_a_checkpoint_that_is_not_there_is_an_error(opened, tmp_path):
    with pytest.raises(
        CheckpointError, match="no checkpoint there; give a run directory or one of its checkpoints"
    ):
        find_params(tmp_path)
    _saved(opened, 1).close()
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/checkpoints: no checkpoint of step 7$"):
        find_params(tmp_path, 7)


def test_what_looks_like_a_checkpoint_and_is_none_is_named(opened, two, tmp_path, caplog):
    shutil.copytree(two / "2", two / "002")
    (two / "9").write_text("a file")
    assert find_params(tmp_path).step == 2
    lines = [record.message for record in caplog.records]
    assert lines == [
        f"{two}/002 is no checkpoint, its name is not 2: move it away; the newest checkpoint here "
        "is that of step 2",
        f"{two}/9 is no checkpoint, it is no directory: move it away; the newest checkpoint here "
        "is that of step 2",
    ]
    caplog.clear()
    _same_bits(opened().restore(_abstract(_state()), _MODEL), _state(2))
    assert [record.message for record in caplog.records] == lines
    with pytest.raises(
        CheckpointError, match=r"/002: no checkpoint, its name is not 2; rename it$"
    ):
        find_params(two / "002")
    with pytest.raises(CheckpointError, match=r"checkpoints: no checkpoint of step 9$"):
        find_params(tmp_path, 9)


def test_a_run_does_not_begin_anew_beside_a_renamed_checkpoint(opened, two, tmp_path):
    shutil.rmtree(two / "1")
    (two / "2").rename(two / "02")
    for reads in (opened, lambda: find_params(tmp_path)):
        with pytest.raises(
            CheckpointError,
            match=r"/02 is no checkpoint, its name is not 2; there is no other: put ",
        ):
            reads()


def test_a_digest_sees_a_changed_bit_a_swap_and_a_sign():
    leaf = np.arange(12, dtype=np.float32).reshape(3, 4) - 5
    swapped = leaf.copy()
    bit = leaf.copy()
    sign = leaf.copy()
    swapped[[0, 1]] = leaf[[1, 0]]
    bit.view(np.uint32)[2, 3] ^= 1
    sign[1, 1] = -0.0  # equal to 0.0, other bits
    values = [
        digests({"a": {"b": jnp.asarray(x)}})["['a']['b']"] for x in (leaf, swapped, bit, sign)
    ]
    assert len(set(values)) == 4
    # By hand: 1.0 is 0x3f800000 and 2.0 is 0x40000000; bits * (2 index + 1), summed modulo 2^32.
    two = digests({"a": jnp.array([1.0, 2.0], jnp.float32)})
    assert two == {"['a']": (0x3F800000 + 3 * 0x40000000) % 2**32}
    half = digests({"a": jnp.array([1.0, 2.0], jnp.bfloat16)})
    assert half == {"['a']": 0x3F80 + 3 * 0x4000}


def test_the_record_beside_the_arrays_is_plain_json(opened, tmp_path):
    _saved(opened, 3).close()
    record = json.loads((tmp_path / "checkpoints" / "3" / "meta" / "metadata").read_text())
    assert record["step"] == 3 and record["model"] == json.loads(
        json.dumps(dataclasses.asdict(_MODEL))
    )


def test_a_checkpoint_of_another_run_is_refused_by_name(opened, tmp_path):
    _saved(opened, 3)
    own = (tmp_path / "run_id").read_text()
    shutil.move(tmp_path / "checkpoints" / "3", tmp_path / "3")
    (tmp_path / "run_id").unlink()
    _saved(opened, 2)
    other = (tmp_path / "run_id").read_text()
    assert other != own
    shutil.move(tmp_path / "3", tmp_path / "checkpoints" / "3")
    with pytest.raises(
        CheckpointError,
        match=f"checkpoints/3: it is of run {own.strip()}, .* of run {other.strip()}",
    ):
        opened().restore(_abstract(_state()), _MODEL)
    # Without the file the newest checkpoint says which run this is; then the other one is the
    # stranger.
    (tmp_path / "run_id").unlink()
    os.utime(tmp_path / "checkpoints" / "3" / "meta" / "metadata")
    _same_bits(opened().restore(_abstract(_state()), _MODEL), _state(3))
    assert (tmp_path / "run_id").read_text() == own


def test_a_checkpoint_of_an_earlier_version_names_no_run_and_is_read(opened, tmp_path):
    checkpoints = _saved(opened, 3)
    path = tmp_path / "checkpoints" / "3" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    del meta["run"]
    meta["crc32"] = checkpoint._record_checksum(meta)
    path.write_text(json.dumps(meta))
    checkpoints.close()
    (tmp_path / "run_id").unlink()
    _same_bits(opened().restore(_abstract(_state()), _MODEL), _state(3))


def test_a_changed_reference_policy_is_refused(opened):
    """One value of 16 x 24 differs by its last bit."""
    reference = _state(7).params
    checkpoints = opened()
    checkpoints.check_reference(reference, 0, Path("reference"))
    checkpoints.save(3, _state(3), model=_MODEL)
    checkpoints.wait()
    opened().check_reference(reference, 3, Path("reference"))
    embedding = np.array(reference["embedding"])
    embedding[1, 2] = np.nextafter(embedding[1, 2], np.float32(9))
    with pytest.raises(
        CheckpointError, match=r"reference: \['embedding'\] is not what the run began with"
    ):
        opened().check_reference(
            reference | {"embedding": jnp.asarray(embedding)}, 3, Path("reference")
        )
    # A checkpoint of an earlier version, or a run that begins, knows none.
    opened().check_reference(
        reference | {"embedding": jnp.asarray(embedding)}, 0, Path("reference")
    )

"""Supervised warm-up on a policy small enough to follow: one table of next-token logits."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.config.settings import WarmupSettings
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, logical_axes
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh, one_device_mesh
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training.warmup import lay_out, warm_up
from tests.support.waiting import HANGS_S

_PROMPTS = [[1, 2], [1, 3], [4]]
_SOLUTIONS = [[5, 7], [6, 6, 7], [7]]
_IDS = [
    np.array(prompt + solution, np.int32)
    for prompt, solution in zip(_PROMPTS, _SOLUTIONS, strict=True)
]
_TARGETS = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(_IDS, _PROMPTS, strict=True)]
_AXES = {"table": (None, None)}
_EXAMPLES = EncodedPrompts(problems=[], token_ids=_IDS, targets=_TARGETS)


def _table_logprobs(params, rows):
    """The policy: logits of the next token are a row of `table`."""
    logprobs = jax.nn.log_softmax(params["table"], axis=-1)
    before = jnp.roll(rows.input_ids, 1, axis=-1)
    picked = jnp.where(rows.completion_mask, logprobs[before, rows.input_ids], 0.0)
    return picked, jnp.zeros_like(picked)


def _settings(steps, batch_size=3, learning_rate=0.1):
    return WarmupSettings(task="x", steps=steps, batch_size=batch_size, learning_rate=learning_rate)


def _train(settings, *, seed=0, start=None, logprobs=_table_logprobs, mesh=None):
    seen = []
    params = {"table": jnp.zeros((8, 8), jnp.float32) if start is None else jnp.asarray(start)}
    mesh = mesh or one_device_mesh()
    trained = warm_up(
        jax.device_put(params, replicated(mesh)),
        _AXES,
        lay_out(_EXAMPLES, 8),
        logprobs,
        settings,
        seed=seed,
        mesh=mesh,
        on_step=lambda *values: seen.append(values),
    )
    return np.asarray(trained["table"]), seen


def test_the_first_loss_is_the_mean_over_solution_tokens():
    # Only solution tokens count, each once: 6 of them, all at log 8 = 2.0794 under a uniform
    # policy.
    _, seen = _train(_settings(1))
    assert seen == [(1, pytest.approx(np.log(8), abs=1e-6))]


def test_tokens_weigh_alike_not_rows_and_prompts_not_at_all():
    # 7 after 4 has probability 1/2 in place of 1/8: one token of six. A mean of row means would
    # give it a third, and counting prompt tokens would divide by 11.
    start = np.zeros((8, 8), np.float32)
    start[4, 7] = np.log(7)
    _, seen = _train(_settings(1), start=start)
    assert seen[0][1] == pytest.approx((5 * np.log(8) + np.log(2)) / 6, abs=1e-6)


def test_it_learns_the_solutions_and_leaves_what_it_never_saw():
    table, seen = _train(_settings(200))
    assert [step for step, _ in seen] == [50, 100, 150, 200]
    losses = [loss for _, loss in seen]
    assert losses == sorted(losses, reverse=True) and losses[0] < np.log(8)
    # After 6 come 6 and 7 equally often: log 2 for two tokens of six is what can't be learned.
    floor = 2 * np.log(2) / 6
    assert floor < losses[-1] < floor + 0.02
    assert [int(np.argmax(table[token])) for token in (2, 3, 4, 5)] == [5, 6, 7, 7]
    np.testing.assert_array_equal(table[[0, 1, 7]], 0.0)  # never before a solution's token


def _one_gradient(params, rows):
    """A policy whose loss falls with one parameter at slope 1, whatever the rows."""
    logprobs = jnp.where(rows.completion_mask, params["table"][0, 0], 0.0)
    return logprobs, jnp.zeros_like(logprobs)


def test_the_learning_rate_rises_over_a_twentieth_and_decays_to_0():
    # Under a gradient that stays, an update of Adam is its learning rate. A single update has all of
    # it. Of 40 updates two rise, lr / 2 and lr; then 38 fall by the cosine: lr (38 / 2 + 1 / 2).
    # Together 21 lr = 2.1; at a constant rate it would be 4.
    table, _ = _train(_settings(1), logprobs=_one_gradient)
    assert table[0, 0] == pytest.approx(0.1, abs=1e-6)
    table, _ = _train(_settings(40), logprobs=_one_gradient)
    assert table[0, 0] == pytest.approx(2.1, abs=1e-4)


def _broken_gradient(params, rows):
    """A policy with a loss of 1 and a gradient that is not a number."""
    logprobs = jnp.where(rows.completion_mask, jnp.sqrt(params["table"][0, 0]) * 0.0 - 1.0, 0.0)
    return logprobs, jnp.zeros_like(logprobs)


def test_a_gradient_that_is_not_finite_stops_too():
    with pytest.raises(ValueError, match=r"^warmup: loss is nan at step 2; "):
        _train(_settings(2), logprobs=_broken_gradient)


def test_the_same_call_gives_the_same_bits_and_another_seed_another_order():
    first, _ = _train(_settings(20, batch_size=2))
    again, _ = _train(_settings(20, batch_size=2))
    other, _ = _train(_settings(20, batch_size=2), seed=1)
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-4


def test_every_example_is_seen_once_an_epoch():
    seen = []

    def logprobs(params, rows):
        jax.debug.callback(
            lambda ids: seen.append(sorted(map(tuple, np.asarray(ids).tolist()))), rows.input_ids
        )
        return _table_logprobs(params, rows)

    _train(_settings(6, batch_size=1), logprobs=logprobs)
    jax.effects_barrier()
    epochs = [sorted(row for batch in seen[start : start + 3] for row in batch) for start in (0, 3)]
    assert len(set(epochs[0])) == 3 and epochs[0] == epochs[1]


def test_a_batch_larger_than_the_data_is_all_of_it():
    large, _ = _train(_settings(10, batch_size=64))
    whole, _ = _train(_settings(10, batch_size=3))
    np.testing.assert_allclose(large, whole, atol=1e-6)


def test_a_loss_that_is_not_finite_stops_and_names_the_setting():
    start = np.zeros((8, 8), np.float32)
    start[4, 4] = np.nan
    with pytest.raises(
        ValueError, match=r"^warmup: loss is nan at step 3; lower warmup\.learning_rate$"
    ):
        _train(_settings(3), start=start)


def test_the_callback_may_stop_it():
    def stop(done, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(
            {"table": jnp.zeros((8, 8))},
            _AXES,
            lay_out(_EXAMPLES, 8),
            _table_logprobs,
            _settings(100),
            seed=0,
            mesh=one_device_mesh(),
            on_step=stop,
        )


def test_a_decoder_learns_by_the_training_stacks_own_forward():
    model = ModelConfig(
        "qwen3", 8, 16, 32, 1, 2, 1, 8, tie_word_embeddings=True, initializer_range=0.1
    )
    params = init_params(model, jax.random.key(0))
    seen = []
    mesh = one_device_mesh()
    warm_up(
        params,
        logical_axes(model),
        lay_out(_EXAMPLES, 8),
        make_row_logprobs(model, Compute(one_segment=True), temperature=1.0, mesh=mesh),
        _settings(100, learning_rate=0.02),
        seed=0,
        mesh=mesh,
        on_step=lambda done, loss: seen.append(loss),
    )
    # A decoder sees what stands before the 6: nothing is left that it can't learn.
    assert seen[0] < np.log(8) and seen[-1] < 0.05


_MANY = """
import jax, jax.numpy as jnp, numpy as np
from dcmdp_jax.config.settings import WarmupSettings
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.parallel.sharding import replicated
from dcmdp_jax.training.warmup import lay_out, warm_up
from dcmdp_jax.models.params import init_params

def logprobs(params, rows):
    x = jnp.eye(256)
    for _ in range(4):
        x = x @ params["table"]
    return rows.input_ids * (1e-6 * jnp.sum(x) - 1.0), None

mesh = make_mesh(2)
params = jax.device_put({"table": jnp.eye(256)}, replicated(mesh))
settings = WarmupSettings(task="x", steps=2000, batch_size=2, learning_rate=1e-6)
ids = [np.array([1, 2, 3, 1, 2, 3], np.int32)] * 4
examples = EncodedPrompts(problems=[], token_ids=ids, targets=[np.arange(6) > 2] * 4)
axes = {"table": (None, None)}
rows = lay_out(examples, 8)
warm_up(params, axes, rows, logprobs, settings, seed=0, mesh=mesh, on_step=lambda *_: None)
print("done")
"""


@pytest.mark.long
def test_steps_started_faster_than_they_end_do_not_deadlock():
    # XLA's CPU client has as many threads as cores here; with more than 32 steps in flight it
    # deadlocks.
    done = subprocess.run(
        [sys.executable, "-c", _MANY],
        env={**os.environ, "NPROC": "2", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]


def test_a_batch_is_replicated():
    # Two rows of the three fit two devices; the order of the seed decides which, so the loss is
    # that of a batch of two.
    table, seen = _train(
        _settings(1, batch_size=3), mesh=make_mesh(data=2, devices=jax.devices()[:2])
    )
    expected, of_two = _train(_settings(1, batch_size=2))
    np.testing.assert_allclose(table, expected, atol=1e-7)
    assert seen == [(1, pytest.approx(of_two[0][1], abs=1e-6))]
    with pytest.raises(
        ValueError,
        match=r"config\.warmup\.batch_size: got 3, with 3 worked solutions; the mesh splits",
    ):
        _train(_settings(1, batch_size=3), mesh=make_mesh(data=4, devices=jax.devices()[:4]))

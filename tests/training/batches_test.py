"""A batch that is sampled ahead on several hosts: what they agree on, and what the sampler's thread leaves to them."""

import contextlib
import threading
from types import SimpleNamespace

from dcmdp_jax.training.ahead import Begun
from dcmdp_jax.training.batches import Batches
from dcmdp_jax.training.step_rollout import Share


def _batches(largest, rollouts, measured, *, exchanges):
    def metrics(episodes, step, *, wanted, first):
        measured.append((wanted, first))
        return {"mismatch/noise_floor": 0.25}

    batches = object.__new__(Batches)
    batches._lag, batches._exchanges = 1, exchanges
    batches._ahead = SimpleNamespace(beside=exchanges, closing=threading.Event())
    batches._alone, batches._check_stop = contextlib.nullcontext, lambda: None
    batches._config = SimpleNamespace(algorithm=SimpleNamespace(measured_steps=4))
    batches._plan = SimpleNamespace(hosts=SimpleNamespace(largest=largest), sampling=SimpleNamespace(group_size=8))
    batches._rollouts, batches._noise_floor = rollouts, SimpleNamespace(metrics=metrics)
    return batches


def test_hosts_that_take_turns_pack_the_largest_noise_floor_of_all(monkeypatch):
    """This host's engine has 0.25, another's 0.5: c must be moved by the same number on both."""
    monkeypatch.setattr(Batches, "_pack", lambda self, rollout, step: (None, (), {}))
    rollouts = SimpleNamespace(sample=lambda *_: SimpleNamespace(episodes=[]))
    made = _batches(lambda value: [max(value, 0.5)], rollouts, measured := [], exchanges=False)._make_ahead(0, 0)
    assert made.floor == {"mismatch/noise_floor": 0.5} and measured == [(True, 0)]


def test_a_sampler_beside_the_step_meets_nobody_and_counts_completions_over_all_hosts():
    """This host's share begins with the third of the call's prompts, so with completion 2 x 8."""

    def largest(*_):
        raise AssertionError("a meeting in the sampler's thread")

    rollouts = SimpleNamespace(sample_share=lambda *_: Share([4, 5, 6, 7], 2, [], [], None))
    made = _batches(largest, rollouts, measured := [], exchanges=True)._make_ahead(5, 0)
    assert isinstance(made, Begun) and made.floor == {"mismatch/noise_floor": 0.25} and len(made.problems) == 4
    assert measured == [(False, 16)]

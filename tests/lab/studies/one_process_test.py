"""Which parts runs of a study share: the step of one kind, the engine of like kinds."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from dcmdp_jax.config.settings import Config
from dcmdp_jax.lab.studies import one_process
from dcmdp_jax.training.build import SharedParts


@pytest.fixture
def made(monkeypatch):
    """What is made and closed, in order; a part is its number."""
    events = []

    def share(plan, stack):
        events.append("engine")
        stack.callback(events.append, "closed")
        return SharedParts(len(events), "verifier", f"programs of {plan.config.algorithm.multiplier_max}")

    def programs(config, *rest):
        events.append("step")
        return f"programs of {config.algorithm.multiplier_max}"

    monkeypatch.setattr(one_process, "share_parts", share)
    monkeypatch.setattr(one_process, "make_step_programs", programs)
    monkeypatch.setattr(one_process, "build_parts", lambda plan, stack, shared: shared)
    return events


def _plan(section=None, **changes):
    config = Config()
    if section:
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})
    return SimpleNamespace(config=config, model=None, compute=None, mesh=None)


def test_another_charge_makes_a_step_and_another_engine_closes_the_last(made):
    with one_process._Shared() as shared, contextlib.ExitStack() as stack:
        first = shared.build(_plan(), stack)
        assert shared.build(_plan("training", seed=9), stack) is first
        assert shared.build(_plan("algorithm", multiplier=0.5), stack) is first and made == ["engine"]
        second = shared.build(_plan("algorithm", multiplier_max=7.0), stack)
        assert made == ["engine", "step"]
        assert (second.engine, second.programs) == (first.engine, "programs of 7.0") != (first.engine, first.programs)
        third = shared.build(_plan("rollout", max_rows=8), stack)
        assert made == ["engine", "step", "closed", "engine"] and third.engine != first.engine
    assert made[-1] == "closed"

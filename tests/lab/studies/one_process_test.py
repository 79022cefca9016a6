"""Which parts runs of a study share: the step of one kind, the engine of like kinds."""

import dataclasses
from types import SimpleNamespace

import pytest

from dcmdp_jax.config.settings import Config
from dcmdp_jax.lab.studies import one_process


@pytest.fixture
def made(monkeypatch):
    """What is made, trained and closed, in order; an engine is its number."""
    events = []

    def start(shared, lent):
        if lent is None:
            events.append("engine")
            shared.callback(events.append, "closed")
        return lent or SimpleNamespace(engine=len(events))

    def programs(config, *rest):
        events.append("step")
        return f"programs of {config.algorithm.multiplier_max}"

    def train(task, placement, weights, start, *, show, programs):
        events.append((start().engine, programs))

    task = SimpleNamespace(model=None, lora=None)
    run = SimpleNamespace(task=task, placement=None, weights=None, start=start)
    monkeypatch.setattr(one_process.Run, "check", lambda config: run)
    monkeypatch.setattr(one_process, "make_step_programs", programs)
    monkeypatch.setattr(one_process, "train", train)
    return events


def _config(section=None, **changes):
    config = Config()
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **changes)})


def test_another_charge_makes_a_step_and_another_engine_closes_the_last(made):
    with one_process.Shared() as shared:
        for section, changes in (
            ("training", {"seed": 1}),
            ("training", {"seed": 9}),
            ("algorithm", {"multiplier": 0.5}),
            ("algorithm", {"multiplier_max": 7.0}),
            ("rollout", {"max_rows": 8}),
        ):
            shared.train(_config(section, **changes), print)
    first = (2, f"programs of {Config().algorithm.multiplier_max}")
    one = ["step", "engine", first, first, first, "step", (2, "programs of 7.0"), "closed"]
    assert made == [*one, "step", "engine", (10, first[1]), "closed"]

"""Which parts runs of a study share: the step of one kind, the engine of like kinds."""

import dataclasses

import pytest

from dcmdp_jax.config.settings import Config
from dcmdp_jax.lab.studies import one_process


@pytest.fixture
def made(monkeypatch):
    """What is made, trained and closed, in order; an engine is its number."""
    events = []

    class FakeRun:
        model = compute = mesh = verifier = None

        def __init__(self, config, lasting, **parts):
            self.__dict__ = {"config": config, "lasting": lasting, **parts}

        def check(self):
            return self

        def __getattr__(self, name):
            assert name == "engine"
            events.append("engine")
            self.lasting.callback(events.append, "closed")
            self.engine = len(events)
            return self.engine

    def programs(config, *rest):
        events.append("step")
        return f"programs of {config.algorithm.multiplier_max}"

    monkeypatch.setattr(one_process, "Run", FakeRun)
    monkeypatch.setattr(one_process, "make_step_programs", programs)
    monkeypatch.setattr(one_process, "train", lambda run, show, programs: events.append((run.engine, programs)))
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
    first = (1, f"programs of {Config().algorithm.multiplier_max}")
    one = ["engine", "step", first, first, first, "step", (1, "programs of 7.0"), "closed"]
    assert made == [*one, "engine", "step", (9, first[1]), "closed"]

"""What a run starts, and who closes it."""

import dataclasses

import pytest

from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind
from dcmdp_jax.engines.machine import Machine, MemoryPart
from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import MATH, Reward
from dcmdp_jax.run.memory_use import EngineSetup, MemoryUse
from dcmdp_jax.run.services import start_services
from tests.support.small_task import EchoEngine, small_task


class _Kind(EngineKind):
    """Counts the engines that it started and that were closed."""

    name = "counted"

    def __init__(self):
        self.started = self.closed = 0

    def build(self, arguments):
        self.started += 1
        engine = EchoEngine()
        engine.close = self._close
        return engine

    def _close(self):
        self.closed += 1


def _task():
    return dataclasses.replace(small_task(task={"verifier_workers": 1}), rewards=(Reward(MATH),))


def _setup(kind, *, needed=0, free=None):
    memory = MemoryUse(
        (MemoryPart("weights", host=needed, lower="a smaller model"),),
        Machine(platform="cpu", devices=1, device_bytes=None, host_bytes=free),
    )
    return EngineSetup(kind=kind, arguments=EngineArguments(), workload=None, memory=memory)


def test_services_close_their_engine():
    kind = _Kind()
    with start_services(_task(), _setup(kind)) as services:
        assert (kind.started, kind.closed) == (1, 0) and services.turns is None
    assert kind.closed == 1


def test_an_engine_that_does_not_fit_is_not_started():
    kind = _Kind()
    with pytest.raises(
        UserError,
        match="^memory: this machine has 1.0 GiB and the phase 'weight_sync' takes at least 2.0, of",
    ):
        start_services(_task(), _setup(kind, needed=2 * 2**30, free=2**30))
    assert kind.started == 0

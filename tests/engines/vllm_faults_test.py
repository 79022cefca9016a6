"""Faults of the sidecar and their consequences: killed, stopped, orphaned, out of disk, refused."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.engines.sidecar import process, segments, weights
from dcmdp_jax.engines.sidecar.process import Sidecar
from dcmdp_jax.engines.sidecar.supervisor import Supervisor
from tests.support.sampling import assert_same_samples, sample
from tests.support.vllm_tools import (
    STOP,
    left_behind,
    pid_of,
    prompts,
    random_params,
    sidecars,
    small_model,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("nothing_left")
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=40, stop_token_ids=(STOP,))
FAULTY = Path(__file__).with_name("faulty_sidecar.py")


@pytest.fixture(scope="module")
def engine(start):
    config = small_model()
    made = start(config, precision="bfloat16")
    made.sync_weights(random_params(config, 7), 7)
    return made


def _supervisor(engine):
    return engine.replicas[0].supervisor


def _same(first, second):
    assert_same_samples(first, second)
    assert first.policy_version == second.policy_version


@pytest.mark.parametrize(
    ("when", "fault"),
    [
        pytest.param("idle", signal.SIGKILL, marks=pytest.mark.long),
        ("generating", signal.SIGKILL),
        pytest.param("generating", signal.SIGSTOP, marks=pytest.mark.long),
    ],
)
def test_a_broken_sidecar_is_replaced_and_repeats_itself(engine, monkeypatch, when, fault):
    """The whole call again, with the same weights and seeds: the same bits as if nothing had
    happened.
    """
    asked = prompts(500, engine.config)
    before = sample(engine, asked, SAMPLED, seed=1, step=1)
    first = pid_of(engine)
    if fault == signal.SIGSTOP:
        # One that says nothing for so long is replaced, a stopped one or one that other load holds
        # up.
        stream = Sidecar.request

        def impatient(self, op, *arguments, **options):
            return stream(
                self, op, *arguments, **options | ({} if op == "start" else {"timeout_s": 5.0})
            )

        monkeypatch.setattr(Sidecar, "request", impatient)
        monkeypatch.setattr(_supervisor(engine), "max_restarts", 100)

    def fail(complete):
        """At each list that is pulled, with the first sidecar in the middle of the call."""
        if pid_of(engine) == first:
            with contextlib.suppress(
                ProcessLookupError
            ):  # while its worker process, if it has one, is waited for
                os.kill(first, fault)

    if when == "idle":
        os.kill(first, fault)
    _same(before, sample(engine, asked, SAMPLED, seed=1, step=1, on_pull=fail))
    assert pid_of(engine) != first
    assert not Path(f"/proc/{first}").exists()


@pytest.mark.long
def test_killed_while_taking_weights(engine):
    """Never half-updated: a new sidecar gets the new weights whole."""
    config = engine.config
    asked = prompts(10, config)
    engine.sync_weights(random_params(config, 8), 8)
    new = sample(engine, asked, SAMPLED, seed=1, step=1)
    engine.sync_weights(random_params(config, 7), 7)
    old = sample(engine, asked, SAMPLED, seed=1, step=1)
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(new.completion_ids, old.completion_ids, strict=True)
    )
    for delay in (0.0, 0.03):
        pid = pid_of(engine)
        kill = threading.Timer(delay, os.kill, (pid, signal.SIGKILL))
        kill.start()
        engine.sync_weights(random_params(config, 8), 8)
        kill.join()
        _same(new, sample(engine, asked, SAMPLED, seed=1, step=1))
        engine.sync_weights(random_params(config, 7), 7)
        _same(old, sample(engine, asked, SAMPLED, seed=1, step=1))


def test_weights_that_arrive_changed_are_not_used(start):
    """One byte altered in shared memory behind the trainer's back: every sidecar is refused, then
    the run ends.
    """
    config = small_model()
    engine = start(config, script=FAULTY, probe=False, **_fault("none"))
    bridge = engine.weights.bridge
    publish = bridge.publish

    def tampering(params, segment, version):
        sums = publish(params, segment, version)
        segment.bytes[bridge.manifest[3].offset] ^= 1
        return sums

    bridge.publish = tampering
    limit, _supervisor(engine).max_restarts = _supervisor(engine).max_restarts, 0
    try:
        with pytest.raises(
            EngineError,
            match=r"failed 1 times in a row, at last: weights of version 9: .* arrived changed",
        ):
            engine.sync_weights(random_params(config, 9), 9)
    finally:
        bridge.publish, _supervisor(engine).max_restarts = publish, limit
    engine.sync_weights(random_params(config, 7), 7)
    assert sample(engine, prompts(2, config), SAMPLED, seed=0, step=0).policy_version == 7
    engine.close()


def test_an_engine_with_another_policy_is_found_out(engine):
    """The probe: the trainer's log-probs are those of other weights than the engine has."""
    config = engine.config
    probe = engine.weights.probe
    other = random_params(config, 1)
    limit, _supervisor(engine).max_restarts = _supervisor(engine).max_restarts, 0
    engine.weights.probe = lambda params, ids: probe(other, ids)
    try:
        with pytest.raises(
            EngineError, match=r"nats from the trainer's on average, allowed are 1 "
        ):
            engine.sync_weights(random_params(config, 7), 7)
    finally:
        engine.weights.probe, _supervisor(engine).max_restarts = probe, limit
    assert engine.sync_weights(random_params(config, 7), 7)["mismatch/probe"] < 0.1


def test_broken_weights_are_the_trainers_fault(engine):
    """NaN in the parameters: the error says where it comes from, once, without restarts."""
    config = engine.config
    broken = random_params(config, 7)
    broken["norm"]["scale"] = broken["norm"]["scale"].at[0].set(np.nan)
    pid = pid_of(engine)
    with pytest.raises(
        EngineError, match="the trainer's own log-probs of the probe are not finite"
    ):
        engine.sync_weights(broken, 9)
    assert pid_of(engine) == pid
    engine.sync_weights(random_params(config, 7), 7)


_PARENT = """
import sys
sys.path.insert(0, {root!r})
from tests.support.vllm_tools import *
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.protocol import SamplingParams
from pathlib import Path
config = small_model()
engine = VllmEngine(EngineArguments("bfloat16", "bfloat16", max_total_tokens=TOTAL, max_rows=ROWS, model=config,
    settings=vllm_settings(), directory=Path({directory!r})))
engine.sync_weights(random_params(config, 0), 0)
while True:
    for _ in engine.generate(prompts(500, config), SamplingParams(4, 40), seed=0, step=0):
        print(pid_of(engine), flush=True)
"""


@pytest.mark.long
def test_a_sidecar_dies_with_its_parent(vllm_is_installed, tmp_path):
    """kill -9 of the trainer in the middle of a call."""
    root = str(Path(__file__).parents[2])
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT.format(root=root, directory=str(tmp_path))],
        stdout=subprocess.PIPE,
        text=True,
    )
    # The first sign of progress.
    assert int(parent.stdout.readline()) in sidecars(parent.pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not sidecars(parent.pid), "the end of the sidecar")
    # Of torch's compiler no directory either.
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "config.json",
        "sidecar.log",
        "tmp",
    ]
    parent.stdout.close()


def test_a_full_disk_costs_the_log_only(start, tmp_path, caplog):
    """/dev/full takes no byte: the sidecar's output is dropped with a warning, and everything else
    works.
    """
    (tmp_path / "sidecar.log").symlink_to("/dev/full")
    engine = start(small_model(), script=FAULTY, probe=False, directory=tmp_path, **_fault("none"))
    engine.sync_weights(random_params(engine.config, 7), 7)
    assert (
        len(sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0).completion_ids) == 4
    )
    assert "No space left on device; the process's output is no longer kept" in caplog.text
    engine.close()


def test_too_little_shared_memory_is_said_before_anything_starts(
    vllm_is_installed, monkeypatch, tmp_path, start
):
    """Two copies of 64*64 + ... weights: the line says how much is needed and how much there is."""
    config = small_model()
    before = sidecars()
    monkeypatch.setattr(weights, "available_bytes", lambda: 1 << 16)
    needed = 2 * weights.WeightBridge(config, dtype="float32").num_bytes / 2**30
    with pytest.raises(MemoryError, match=rf"need {needed:.2f} GiB, 0\.00 GiB are free"):
        start(config)
    monkeypatch.undo()
    monkeypatch.setattr(segments.os, "posix_fallocate", _no_room)
    with pytest.raises(
        MemoryError, match=r"shared memory dcmdp-weights-0: 0\.00 GiB cannot be allocated"
    ):
        start(config)
    assert sidecars() == before


def _no_room(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.long
def test_an_argument_that_vllm_refuses_is_one_line(start):
    with pytest.raises(
        EngineError, match="vLLM does not start: TypeError: .*no_such_argument"
    ) as caught:
        start(small_model(), engine_args='{"no_such_argument": 1}')
    assert "\n" not in str(caught.value)


def test_a_start_that_takes_too_long_ends(start):
    with pytest.raises(EngineError, match=r"does not start: start: .*nothing for 1 s"):
        start(small_model(), start_timeout_s=1.0)


def test_a_training_run_waits_for_the_start_at_its_first_sync(start, tmp_path):
    engine = start(
        small_model(),
        script=FAULTY,
        probe=False,
        directory=tmp_path,
        prepare=True,
        **_fault("slow_start"),
    )
    engine.check_start()
    assert engine.replicas[0].supervisor.sidecar is None
    threading.Timer(1.0, (tmp_path / "go").touch).start()
    engine.sync_weights(random_params(engine.config, 7), 7)
    assert (tmp_path / "go").exists() and engine.replicas[0].supervisor.sidecar.serial == 1


def test_a_start_that_fails_beside_the_warm_up_is_told_once_it_is_known(start):
    engine = start(
        small_model(), script=FAULTY, prepare=True, start_timeout_s=1.0, **_fault("slow_start")
    )
    engine.check_start()
    with pytest.raises(EngineError, match=r"does not start: start: .*nothing for 1 s") as caught:
        wait_until(engine.check_start, "the failure")
    assert "\n" not in str(caught.value)


def test_an_engine_that_is_closed_while_it_starts_leaves_no_process(start):
    before = sidecars()
    engine = start(small_model(), script=FAULTY, prepare=True, **_fault("slow_start"))
    wait_until(lambda: sidecars() - before, "a process")
    engine.close()
    assert sidecars() == before


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("garbage", "not a frame"),
        ("huge", "frame too large"),
        ("wrong_answer", "answered 'pong', not 'generated'"),
        ("short", "tokens and .* log-probs"),
        ("outside", "token ids"),
        ("stale_version", "sampled with version 6"),
        ("dies", "killed by signal 9, Killed"),
        ("hangs", "nothing for 2 s"),
        ("bad_checksum", "arrived changed"),
        ("few_checksums", "checksums of shape"),
        ("progress_of_no_row", "1 rows from 4 to 4, not of 4 requests"),
        ("progress_twice", "completion 2 arrived twice"),
        ("missing_row", "3 completions for 4 requests"),
        ("no_checksums", "checksums of shape"),
    ],
)
def test_nonsense_is_never_believed(start, fault, message, monkeypatch):
    """A sidecar that always answers wrongly: restarts up to the limit, then one clear end with its
    last lines.
    """
    monkeypatch.setattr(Supervisor, "max_restarts", 1)
    if fault == "hangs":
        monkeypatch.setattr(process, "STALL_TIMEOUT_S", 2.0)
    with pytest.raises(EngineError, match=message) as caught:
        engine = start(small_model(), script=FAULTY, probe=False, **_fault(fault))
        engine.sync_weights(random_params(engine.config, 7), 7)
        sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0)
    assert "failed 2 times in a row" in str(caught.value)
    assert f"faulty sidecar: {fault}" in str(caught.value)


def test_a_fault_that_passes_is_survived(start, tmp_path):
    """NaN once, then right: the call is asked again of a new sidecar. NaN twice are the numbers,
    and are returned.
    """
    engine = start(
        small_model(), script=FAULTY, probe=False, directory=tmp_path, **_fault("nan_once")
    )
    engine.sync_weights(random_params(engine.config, 7), 7)
    rollout = sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0)
    assert all(np.isfinite(logprobs).all() for logprobs in rollout.rollout_logprobs)
    engine.close()
    engine = start(small_model(), script=FAULTY, probe=False, **_fault("nan"))
    engine.sync_weights(random_params(engine.config, 7), 7)
    rollout = sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0)
    assert all(np.isnan(logprobs).all() for logprobs in rollout.rollout_logprobs)
    engine.close()


def test_groups_come_as_they_finish(start):
    """Half of a group is none, and the second group comes before the first."""
    engine = start(small_model(), script=FAULTY, probe=False, **_fault("progress"))
    engine.sync_weights(random_params(engine.config, 7), 7)
    rollout = sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0)
    assert [groups for groups in rollout.pulled if groups] == [[1], [0]]
    engine.close()


def test_a_restarted_sidecar_delivers_only_what_is_missing(start, tmp_path, caplog):
    """It dies after the first of two groups: the new one samples both, the caller gets the second
    alone.

    While it is started again, empty lists let the caller look for a signal.
    """
    engine = start(
        small_model(), script=FAULTY, probe=False, directory=tmp_path, **_fault("dies_once_midway")
    )
    engine.sync_weights(random_params(engine.config, 7), 7)
    first = pid_of(engine)
    rollout = sample(engine, prompts(2, engine.config), SAMPLED, seed=0, step=0)
    assert [groups for groups in rollout.pulled if groups] == [[0], [1]]
    assert pid_of(engine) != first and "restart 1 in" in caplog.text
    engine.close()


@pytest.mark.parametrize("how", ["closed", "abandoned", "reward_fails"])
def test_a_call_that_is_given_up_leaves_the_engine_as_it_was(engine, how):
    """In the middle of 600 requests: none goes on, the sidecar is the same, and so are the bits of
    the next call.
    """
    asked = prompts(300, engine.config)
    before = sample(engine, asked, SAMPLED, seed=1, step=1)
    pid = pid_of(engine)
    groups = engine.generate(asked, SAMPLED, seed=1, step=1)
    assert len(next(groups)) < 600
    if how == "closed":
        groups.close()
        running = _supervisor(engine).sidecar.request("health", answer="healthy").header["running"]
        assert running == 0
    elif how == "reward_fails":
        with pytest.raises(ZeroDivisionError), contextlib.closing(groups):
            for _ in groups:
                1 / 0  # noqa: B018
    _same(before, sample(engine, asked, SAMPLED, seed=1, step=1))
    # Then one is given up by a weight sync.
    again = engine.generate(asked, SAMPLED, seed=1, step=1)
    next(again)
    engine.sync_weights(random_params(engine.config, 7), 7)
    for ended in (groups, again) if how == "abandoned" else (again,):
        with pytest.raises(EngineError, match="generate: ended by a later request"):
            next(ended)
    _same(before, sample(engine, asked, SAMPLED, seed=1, step=1))
    assert pid_of(engine) == pid


def _fault(name):
    return {"engine_args": f'{{"fault": "{name}"}}'}


def test_the_look_itself_sees_something(engine):
    """Were it blind, every test here would find nothing left."""
    assert pid_of(engine) in sidecars()
    path = Path("/dev/shm/psm_seen_by_the_test")
    path.touch()
    try:
        assert str(path) in left_behind()
    finally:
        path.unlink()

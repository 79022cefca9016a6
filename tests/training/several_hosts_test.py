"""Runs of two processes on fake devices are like one: killed, stopped, resumed elsewhere."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.processes import free_port
from tests.support.run_invariants import contradictions
from tests.support.runs import read_records
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

# Two devices, in one process or one in each of two; two evaluations, three steps.
_RUN = """
    --config.algorithm.tolerance_steps=2 --config.mesh.data=2 --config.mesh.fsdp=1 --config.warmup.steps=0
    --config.training.steps=3 --config.checkpoint.every_steps=1 --config.checkpoint.keep_last=9
    --config.evaluation.every_steps=3
""".split()

# bin.train; gets a signal in the middle of sampling a step.
_SIGNALLED = """
import os, sys
from dcmdp_jax.commands import failures, train
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.rewards.scoring import BatchScoring

number, step = map(int, sys.argv.pop(1).split())
generate, begin, now = LocalEngine.generate, BatchScoring.begin, []

def noted_generate(self, *arguments, seed, step, **options):
    now[:] = [step, seed]
    return generate(self, *arguments, seed=seed, step=step, **options)

def signalled_begin(self, rows, completion_ids):
    if now == [step, 0] and rows:
        os.kill(os.getpid(), number)
    begin(self, rows, completion_ids)

LocalEngine.generate, BatchScoring.begin = noted_generate, signalled_begin
failures.run_main(train.main)
"""
_PLAIN = ("-m", "bin.train")


# bin.train; gets a signal in the thread that samples the batch of a step.
_SIGNALLED_BESIDE = """
import os, sys, threading
from dcmdp_jax.commands import failures, train
from dcmdp_jax.training.rollout_sampler import StepRollouts

signal_number, step = map(int, sys.argv.pop(1).split())
generate = StepRollouts._generate

def stopped_generate(self, chosen, first_prompt, number, *arguments):
    assert threading.current_thread() is not threading.main_thread()
    if number == step:
        os.kill(os.getpid(), signal_number)
    return generate(self, chosen, first_prompt, number, *arguments)

StepRollouts._generate = stopped_generate
failures.run_main(train.main)
"""


# bin.train; the first compilation in a thread fails.
_FAILS_TO_COMPILE_AHEAD = """
from dcmdp_jax.commands import failures, train
from dcmdp_jax.training import step_programs

compile_beside, tries = step_programs.compile_beside, []

def failing_once(program, name):
    def run():
        tries.append(program)
        print("try", len(tries), flush=True)
        program() if len(tries) > 1 else 1 / 0
    return compile_beside(run, name)

step_programs.compile_beside = failing_once
failures.run_main(train.main)
"""


def _signalled_beside(number, step):
    return ("-c", _SIGNALLED_BESIDE, f"{int(number)} {step}")


def _signalled(number, step):
    return ("-c", _SIGNALLED, f"{int(number)} {step}")


def _start(run_environment, run_dir, settings, *, program=_PLAIN, place=(ROOT, ROOT)):
    config = f"--config={ROOT}/configs/demo.py:debug"
    command = [sys.executable, *program, config, f"--config.run_dir={run_dir}", *settings]
    working_directory, code = place
    return subprocess.Popen(
        command,
        cwd=working_directory,
        env=run_environment | {"PYTHONPATH": str(code)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _two(
    run_environment,
    run_dir,
    settings,
    *,
    programs=(_PLAIN, _PLAIN),
    devices=1,
    settings_of_each=((), ()),
    places=2 * ((ROOT, ROOT),),
):
    """Two processes to their end: (code, stdout, stderr) of both."""
    hosts = [
        f"--config.mesh.cpu_devices={devices}",
        f"--config.hosts.coordinator=localhost:{free_port()}",
        "--config.hosts.processes=2",
        "--config.hosts.timeout_s=10",
    ]
    started = [
        _start(
            run_environment,
            run_dir,
            [*hosts, f"--config.hosts.process={number}", *settings, *settings_of_each[number]],
            program=program,
            place=places[number],
        )
        for number, program in enumerate(programs)
    ]
    try:
        outputs = [process.communicate(timeout=HANGS_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def _one(run_environment, run_dir, settings, *, devices=2):
    settings = [f"--config.mesh.cpu_devices={devices}", *settings]
    process = _start(run_environment, run_dir, settings)
    stdout, stderr = process.communicate(timeout=HANGS_S)
    assert process.returncode == 0, stderr
    return stdout


def _checkpoints(run_dir):
    return sorted(
        int(path.name) for path in (Path(run_dir) / "checkpoints").iterdir() if path.name.isdigit()
    )


def _assert_alike(found, expected, *, without=(), rtol=1e-5):
    """Every metric of every step, to the rounding of float32."""
    assert found.keys() == expected.keys()
    for step in expected:
        assert found[step].keys() == expected[step].keys()
        # A share of rounding, where the engine decodes what it scores.
        for name in expected[step].keys() - {*without, "mismatch/leg_decoding_share"}:
            np.testing.assert_allclose(
                found[step][name],
                expected[step][name],
                rtol=rtol,
                atol=1e-7,
                err_msg=f"{name} of step {step}",
            )


@pytest.fixture(scope="module")
def alone(run_environment, tmp_path_factory):
    """The run of one process on two devices."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    _one(run_environment, run_dir, _RUN)
    return run_dir


@pytest.mark.long
def test_two_processes_with_one_killed_and_resumed_are_like_one_process(
    run_environment, tmp_path, alone
):
    run_dir = tmp_path / "run"
    first, second = _two(
        run_environment, run_dir, _RUN, programs=(_PLAIN, _signalled(signal.SIGKILL, 2))
    )
    assert second[0] == -signal.SIGKILL
    # The other one stands in a collective operation that the dead one never enters: JAX ends it,
    # and says the number.
    advice = f"1 is on {socket.gethostname()}; rerun the same commands to resume"
    assert first[0] == 1 and "unhealthy (stopped sending heartbeats):\n1\n" in first[2]
    assert (
        first[2]
        .splitlines()[-1]
        .startswith("error: a process has given no sign of life for 10 s (the hosts'")
    )
    assert first[2].strip().endswith(advice)
    # The checkpoint of step 2 may have been in the writing.
    last = _checkpoints(run_dir)[-1]
    assert last in (1, 2) and sorted(read_records(run_dir)) == [0, 1, 2]

    first, second = _two(run_environment, run_dir, _RUN)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert f"resuming {run_dir} after step {last}" in first[1] and "after step" not in second[1]
    _assert_alike(read_records(run_dir), read_records(alone))
    assert contradictions(run_dir) == [] and (run_dir / "report.html").is_file()
    samples = [Path(path, "samples.jsonl").read_text().splitlines() for path in (run_dir, alone)]
    for sample, expected in zip(*(map(json.loads, lines) for lines in samples), strict=True):
        assert sample.pop("discrepancy_mean") == pytest.approx(
            expected.pop("discrepancy_mean"), rel=1e-5
        )
        assert sample == expected


def test_the_pages_commands_run_twice_and_the_second_time_from_a_cache_of_process_0(
    run_environment, tmp_path
):
    """Process 1 compiles for its own device what process 0 reads.

    Only process 0 writes programs to the cache.
    """
    page = (ROOT / "docs" / "several_hosts.md").read_text().partition("# on the other host")[0]
    flags = re.findall(r"--config\.hosts\.\w+=\S+", page)
    assert [flag.partition("=")[0].rpartition(".")[2] for flag in flags] == [
        "coordinator",
        "processes",
        "process",
    ]
    environment = {name: value for name, value in run_environment.items() if name != "XLA_FLAGS"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "cache")
    short = [
        "--config.training.steps=1",
        "--config.evaluation.every_steps=0",
        "--config.mesh.cpu_devices=2",
    ]
    for name in ("first", "second"):
        address = f"127.0.0.1:{free_port()}"
        process_0 = [flag.replace("10.0.0.1:1234", address) for flag in flags]
        process_1 = [*process_0[:-1], process_0[-1].replace("=0", "=1")]
        started = [
            _start(environment, tmp_path / name, [*short, *hosts])
            for hosts in (process_0, process_1)
        ]
        ended = [(*process.communicate(timeout=HANGS_S), process.returncode) for process in started]
        assert [code for _, _, code in ended] == [0, 0], ended


def test_a_step_that_one_process_fails_to_compile_ahead_holds_up_nobody(run_environment, tmp_path):
    """Main threads compile in one order on both processes, whatever other threads compile."""
    ended = _two(
        run_environment | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
        tmp_path / "run",
        [
            "--config.warmup.steps=0",
            "--config.training.steps=1",
            "--config.evaluation.every_steps=0",
        ],
        programs=(("-c", _FAILS_TO_COMPILE_AHEAD), _PLAIN),
    )
    assert [code for code, _, _ in ended] == [0, 0] and "try 2" in ended[0][1], ended
    assert sorted(read_records(tmp_path / "run")) == [1]


@pytest.mark.long
def test_the_top_k_tokens_of_two_processes_are_those_of_one(run_environment, tmp_path):
    """Two processes give what one gives, with the rounding of two reductions.

    Their batches are gathered, packed and measured as one process's.
    """
    settings = [
        *_RUN,
        "--config.rollout.top_logprobs=4",
        "--config.training.steps=1",
        "--config.evaluation.every_steps=0",
    ]
    _one(run_environment, tmp_path / "alone", settings)
    ended = _two(run_environment, tmp_path / "two", settings)
    assert [code for code, _, _ in ended] == [0, 0], ended
    [record], [expected] = (read_records(tmp_path / name).values() for name in ("two", "alone"))
    names = [name for name in expected if name.startswith("distribution/")]
    assert "distribution/total_variation" in names and expected["distribution/head_mass"] < 0.999
    for name in names:
        assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.long
def test_two_processes_with_a_lag_stopped_while_sampling_and_resumed_are_like_one_process(
    run_environment, tmp_path
):
    settings = [*_RUN, "--config.rollout.lag=1", "--config.evaluation.every_steps=0"]
    _one(run_environment, tmp_path / "alone", settings)
    run_dir = tmp_path / "run"
    # The batch of step 2 (counted from 0), which the weights of version 1 sample.
    programs = (_PLAIN, _signalled(signal.SIGTERM, 2))
    ended = _two(run_environment, run_dir, settings, programs=programs)
    assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2, ended
    assert _checkpoints(run_dir)[-1] == 1
    ended = _two(run_environment, run_dir, settings)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert f"resuming {run_dir} after step 1" in ended[0][1]
    _assert_alike(read_records(run_dir), read_records(tmp_path / "alone"))
    assert contradictions(run_dir) == []
    assert [read_records(run_dir)[step]["rollout/staleness_max"] for step in (1, 2, 3)] == [0, 1, 1]


_OVERLAPPING = (
    f"--config.rollout.engine={ROOT}/tests/training/overlapping_engine.py:ENGINE",
    "--config.rollout.precision=float32",
    "--config.evaluation.every_steps=0",
    "--config.rollout.lag=1",
)


@pytest.mark.long
def test_two_engines_sample_beside_the_step_and_give_what_one_process_gives(
    run_environment, tmp_path
):
    settings = [
        *_RUN,
        *_OVERLAPPING,
        "--config.training.steps=4",
        "--config.checkpoint.every_steps=9",
    ]
    _one(run_environment, tmp_path / "alone", settings)
    ended = _two(run_environment, tmp_path / "two", settings)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert "lag          1 step(s): the engine samples while a step trains" in ended[0][1]
    # Each process measures the floor and the legs of its own engine, on its own completions.
    of_each = ("mismatch/noise_floor", "mismatch/leg_decoding", "mismatch/leg_one_pass")
    _assert_alike(read_records(tmp_path / "two"), read_records(tmp_path / "alone"), without=of_each)
    assert contradictions(tmp_path / "two") == []
    # Stopped while one of them samples beside the first steps, it ends with what all have finished,
    # and goes on alike.
    for number in (0, 1):
        run_dir = tmp_path / f"stopped{number}"
        programs = [_PLAIN, _PLAIN]
        programs[number] = _signalled_beside(signal.SIGTERM, 2)
        ended = _two(run_environment, run_dir, settings, programs=programs)
        assert [code for code, _, _ in ended] == [128 + signal.SIGTERM] * 2, ended
        ended = _two(run_environment, run_dir, settings)
        assert [code for code, _, _ in ended] == [0, 0], ended
        _assert_alike(read_records(run_dir), read_records(tmp_path / "alone"), without=of_each)
    # Killed there, the other one's collective operation fails, and the dead one is named.
    programs = (_PLAIN, _signalled_beside(signal.SIGKILL, 2))
    [(code, _, errors), _] = _two(run_environment, tmp_path / "killed", settings, programs=programs)
    assert code == 1 and "error: a process has given no sign of life for 10 s" in errors


@pytest.mark.long
def test_a_signal_to_one_process_saves_and_ends_both_at_the_same_step(
    run_environment, tmp_path, alone
):
    for number in (0, 1):
        run_dir = tmp_path / f"run{number}"
        programs = [_PLAIN, _PLAIN]
        programs[number] = _signalled(signal.SIGTERM, 1)
        # Without a checkpoint of its own at step 1: the signal saves it.
        settings = [*_RUN, "--config.checkpoint.every_steps=9"]
        ended = _two(run_environment, run_dir, settings, programs=programs)
        assert [code for code, _, _ in ended] == [143, 143], ended[0][2] + ended[1][2]
        assert "stopped by SIGTERM after step 1, saved; the same command resumes" in ended[0][1]
        assert _checkpoints(run_dir) == [0, 1]
        assert all(code == 0 for code, _, _ in _two(run_environment, run_dir, settings))
        _assert_alike(read_records(run_dir), read_records(alone))


@pytest.mark.long
def test_the_death_of_process_0_ends_the_other_with_its_name(run_environment, tmp_path, alone):
    run_dir = tmp_path / "run"
    first, second = _two(
        run_environment, run_dir, _RUN, programs=(_signalled(signal.SIGKILL, 2), _PLAIN)
    )
    assert first[0] == -signal.SIGKILL and second[0] == 1
    assert f"error: lost the coordinator, process 0 on {socket.gethostname()};" in second[2]
    assert all(code == 0 for code, _, _ in _two(run_environment, run_dir, _RUN))
    _assert_alike(read_records(run_dir), read_records(alone))


def _mesh(data, fsdp):
    return [f"--config.mesh.data={data}", f"--config.mesh.fsdp={fsdp}"]


@pytest.mark.long
def test_a_checkpoint_of_two_processes_continues_on_another_mesh_and_number_of_processes(
    run_environment, tmp_path
):
    """The same loss to float32 rounding, wherever steps 2 and 3 are computed.

    An fsdp mesh has other rows.
    """
    settings = [
        *(setting for setting in _RUN if "fsdp" not in setting and "data" not in setting),
        "--config.rollout.precision=float32",
        "--config.evaluation.every_steps=0",
        # Some completions get it right: without a gradient Adam would turn rounding into steps of
        # full size.
        f"--config.rewards.functions={ROOT}/tests/rewards/planted_rewards.py:begins_with_a_multiple_of_eight",
    ]
    start = tmp_path / "start"
    one_step = [*settings, *_mesh(1, 4), "--config.training.steps=1"]
    ended = _two(run_environment, start, one_step, devices=2)
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    runs = {}
    for name, processes, devices, mesh in (
        ("two processes, fsdp", 2, 2, (1, 4)),
        ("two processes, data and fsdp", 2, 2, (2, 2)),
        ("two processes, one device each", 2, 1, (2, 1)),
        ("one process", 1, 1, (1, 1)),
        ("one process, fsdp", 1, 4, (1, 4)),
    ):
        run_dir = tmp_path / name.replace(" ", "_").replace(",", "")
        shutil.copytree(start, run_dir)
        on_mesh = [*settings, *_mesh(*mesh)]
        if processes == 2:
            ended = _two(run_environment, run_dir, on_mesh, devices=devices)
            assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
        else:
            assert "resuming" in _one(run_environment, run_dir, on_mesh, devices=devices)
        runs[name] = read_records(run_dir)
    expected = runs.pop("two processes, fsdp")
    for records in runs.values():
        for step in (2, 3):
            for name in ("policy/loss", "optimizer/grad_norm", "policy/entropy", "reward/mean"):
                assert records[step][name] == pytest.approx(
                    expected[step][name], rel=1e-4, abs=1e-6
                ), name


@pytest.mark.long
def test_hosts_that_differ_are_found_before_the_first_step(run_environment, tmp_path):
    """Every process names the first difference, and the host that has it."""
    rows = [{"problem": f"1+{i}=", "answer": str(1 + i)} for i in range(8)]
    for name, kept in (("a", rows), ("b", [*rows[:-1], {"problem": "1+7=", "answer": "9"}])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    changed = tmp_path / "changed"
    for part in ("bin", "configs", "dcmdp_jax"):
        shutil.copytree(ROOT / part, changed / part)
    with (changed / "dcmdp_jax" / "algorithm" / "losses.py").open("a") as file:
        file.write("# another version\n")
    same = (tmp_path / "a", ROOT), (tmp_path / "a", ROOT)
    settings = [*_RUN, "--config.task.train=data.jsonl"]
    host = socket.gethostname()
    for places, second, message in (
        (
            same,
            ("--config.training.seed=1",),
            "config.training.seed: process 1 on {0} has 1, process 0 on {0} has 0;",
        ),
        (
            (same[0], (tmp_path / "a", changed)),
            (),
            "code of dcmdp_jax (digest): process 1 on {0} has ",
        ),
        (
            (same[0], (tmp_path / "b", ROOT)),
            (),
            "problems of task.train (digest): process 1 on {0} has 8, ",
        ),
    ):
        ended = _two(
            run_environment,
            tmp_path / "run",
            settings,
            places=places,
            settings_of_each=((), second),
        )
        for code, _, stderr in ended:
            assert code == 2 and f"error: {message.format(host)}" in stderr, stderr
    # The same data, and a run directory that is another one for each.
    (tmp_path / "b" / "data.jsonl").write_text((tmp_path / "a" / "data.jsonl").read_text())
    ended = _two(run_environment, "run", settings, places=(same[0], (tmp_path / "b", ROOT)))
    for code, _, stderr in ended:
        assert (
            code == 2
            and f"error: config.run_dir: run on {host} is not the directory of {host}" in stderr
        ), stderr
    assert not (tmp_path / "run").exists() and not (tmp_path / "a" / "run" / "checkpoints").exists()


# bin.train with a column of its own, declared in one line. Its engine gives every token (1 + prompt
# of the step) over tokens of the completion; the step reports the column's mean where it reports
# the entropy.
_WITH_A_COLUMN = """
import numpy as np
from dcmdp_jax.commands import failures, train
from dcmdp_jax.data.episode import COLUMNS, Column
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.training import step_programs

COLUMNS["marks"] = Column("a number of each sampled token", np.float32, 0.0)

def marked(self, *arguments, first_prompt=0, **options):
    for complete in generate(self, *arguments, first_prompt=first_prompt, **options):
        marks = [(1 + first_prompt + e.group) / e.num_sampled * np.ones(len(e.token_ids), np.float32) for e in complete]
        yield [episode.with_columns(marks=each) for episode, each in zip(complete, marks)]

def reporting(*arguments, **options):
    row_logprobs = make_row_logprobs(*arguments, **options)
    return lambda params, rows: row_logprobs(params, rows)._replace(entropy=rows.columns["marks"])

generate, LocalEngine.generate = LocalEngine.generate, marked
make_row_logprobs, step_programs.make_row_logprobs = step_programs.make_row_logprobs, reporting
failures.run_main(train.main)
"""


@pytest.mark.long
def test_a_declared_column_reaches_the_step_from_two_processes_and_after_a_resume(
    run_environment, tmp_path
):
    run_dir = tmp_path / "run"
    program = ("-c", _WITH_A_COLUMN)
    for steps in (1, 2):
        ended = _two(
            run_environment,
            run_dir,
            [*_RUN, f"--config.training.steps={steps}"],
            programs=(program, program),
        )
        assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
        assert (f"resuming {run_dir} after step 1" in ended[0][1]) == (steps == 2)
    records = read_records(run_dir)
    for step in (1, 2):
        # Four completions of each of four prompts: sum over completions 4 (1 + 2 + 3 + 4) = 40,
        # over 16 mean lengths of tokens. If only one process's column arrived, the sum would be 4
        # (1 + 2) or 4 (3 + 4).
        expected = 40 / (16 * records[step]["completion/length_mean"])
        assert records[step]["policy/entropy"] == pytest.approx(expected, rel=1e-5)

"""Processes that meet, and those that don't: each case in threads, over real sockets of this
machine.
"""

import collections
import concurrent.futures
import contextlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.parallel import meeting
from dcmdp_jax.parallel.hosts import _find_out, join_hosts
from dcmdp_jax.parallel.meeting import meet
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
NAME = socket.gethostname()


@pytest.fixture
def address():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


def _together(*calls):
    """What each call raised, None of one that went on; and the lines that its thread logged."""
    said: dict[int, list[str]] = collections.defaultdict(list)
    handler = logging.Handler()
    handler.emit = lambda record: said[record.thread].append(record.getMessage())

    def one(arguments):
        try:
            return meet(*arguments), said[threading.get_ident()]
        except UserError as error:
            return error, said[threading.get_ident()]

    meeting.logger.addHandler(handler)
    try:
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(one, calls))
    finally:
        meeting.logger.removeHandler(handler)


def test_all_go_on_when_the_last_has_come(address):
    found = _together(*((address, 4, number, 1000.0) for number in (3, 1, 0, 2)))
    assert found == [(None, [])] * 4
    # The port is free for JAX at once.
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", int(address.split(":")[1])))


def test_one_process_waits_for_nobody(address):
    meet(address, 1, 0, 30.0)


def test_those_that_came_are_told_who_did_not(address, monkeypatch):
    monkeypatch.setattr(meeting, "_SAY_EVERY_S", 0.5)
    found = _together((address, 4, 0, 1.2), (address, 4, 2, 30.0))
    for error, said in found:
        assert str(error) == (
            f"coordinator: processes 1, 3 of 4 did not come to {address} in 1.2 s; start the same "
            "command there with its own `process`, check that this address is reached from "
            "there, or raise `timeout_s`"
        )
        assert said == [f"waiting for processes 1, 3 of 4 at {address}"] * 2


def test_an_interrupted_process_0_tells_nobody_to_go(address, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    greet = meeting._greet
    monkeypatch.setattr(meeting, "_greet", lambda *arguments: greet(*arguments) and interrupted())
    messages = []

    def come():
        with socket.create_connection(meeting.split_address(address), timeout=HANGS_S) as caller:
            caller.sendall(b'{"process": 1, "processes": 3, "host": "b"}\n')
            messages.append(caller.makefile("rb").read())

    thread = threading.Thread(target=lambda: _until_there(come))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        meet(address, 3, 0, HANGS_S)
    thread.join()
    assert messages == [b'{"heard": true}\n']


def _until_there(call):
    end = time.monotonic() + HANGS_S
    while time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError):
            return call()
        time.sleep(0.01)
    raise TimeoutError


def test_process_0_is_missing(address, monkeypatch):
    monkeypatch.setattr(meeting, "_SAY_EVERY_S", 0.6)
    [(error, said)] = _together((address, 2, 1, 1.0))
    assert str(error) == (
        f"coordinator: process 1 did not find process 0 at {address} in 1 s (Connection refused); "
        "give host:port of process 0, start it, or raise `timeout_s`"
    )
    assert said == [f"process 1: waiting for process 0 at {address} (Connection refused)"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        # RFC 5737 keeps 192.0.2.0/24 for examples: no interface has it.
        ("192.0.2.1:1234", "where process 0 can not listen (Cannot assign requested address)"),
        ("no-such-host.invalid:1234", "whose name is not known on process 0's host"),
    ],
)
def test_an_address_that_process_0_does_not_have_is_told_at_once(wrong, reason):
    with pytest.raises(UserError, match=re.escape(f"coordinator: got {wrong!r}, {reason}")):
        meet(wrong, 2, 0, 1000.0)


@pytest.mark.parametrize(
    ("name", "warns"), [("thishost", True), ("localhost", False), ("127.0.0.1", False)]
)
def test_a_coordinator_whose_own_name_is_loopback_is_told(
    name, warns, address, monkeypatch, caplog
):
    """As Debian's /etc/hosts has a machine's own name: no other host would ever come."""
    port = int(address.rpartition(":")[2])
    resolve = socket.getaddrinfo
    known = {"thishost": "127.0.1.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **more: resolve(known.get(host, host), *rest, **more),
    )
    meeting._listen(f"{name}:{port}").close()
    said = [record.getMessage() for record in caplog.records]
    assert (
        said
        == [
            "coordinator: thishost is 127.0.1.1 here, which no other host reaches; give its address"
        ]
        * warns
    )


def test_a_port_that_is_taken(address):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(address.split(":")[1])))
        taken.listen()
        with pytest.raises(UserError, match=r"can not listen \(Address already in use\)"):
            meet(address, 2, 0, 60.0)


def test_processes_that_were_started_differently(address):
    found = _together((address, 2, 0, 30.0), (address, 3, 1, 30.0))
    line = (
        f"processes: process 1 on {NAME} has 3, process 0 has 2; start all hosts with the same "
        "command"
    )
    assert [str(error) for error, _ in found] == [line, line]


def test_one_number_for_two_processes(address):
    found = _together((address, 3, 0, 30.0), (address, 3, 1, 30.0), (address, 3, 1, 30.0))
    line = f"process: 1 on both {NAME} and {NAME}; each process has a number of its own"
    assert [str(error) for error, _ in found] == [line] * 3


def test_who_left_before_all_were_here_is_missing_again(address, monkeypatch):
    monkeypatch.setattr(meeting, "_SAY_EVERY_S", 0.4)
    monkeypatch.setattr(meeting, "_GREETING_S", 0.05)
    place = ("127.0.0.1", int(address.split(":")[1]))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(_together, (address, 3, 0, 1.5))
        for attempt in range(100):
            try:
                died = socket.create_connection(place)
                break
            except OSError:
                assert attempt < 99
                time.sleep(0.02)
        died.sendall(b'{"process": 1, "processes": 3, "host": "a"}\n')
        # Strangers: one that says nothing, one that speaks something else, one that never ends its
        # line.
        silent = socket.create_connection(place)
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 100_000, b"\xff\n", b"[]\n", b"1\n"):
            with socket.create_connection(place) as stranger:
                stranger.sendall(words)
        time.sleep(0.6)
        died.close()
        [(error, said)] = waiting.result()
        silent.close()
    assert said[0] == f"waiting for process 2 of 3 at {address}"
    assert said[-1] == f"waiting for processes 1, 2 of 3 at {address}"
    assert "processes 1, 2 of 3 did not come" in str(error)


def test_what_answers_is_another_program(address):
    """It refuses the first connection, and says nothing to those after it."""
    with socket.socket() as other, concurrent.futures.ThreadPoolExecutor(1) as pool:
        other.bind(("127.0.0.1", int(address.split(":")[1])))
        other.listen()
        waiting = pool.submit(_together, (address, 2, 1, 1.0))
        connection, _ = other.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        connection.close()
        [(error, _)] = waiting.result()
    assert "1 s (process 0 left before all were here, or another program has this address)" in str(
        error
    )


def _train(address, *flags):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    hosts = ("--config.hosts.processes=2", f"--config.hosts.coordinator={address}")
    command = [sys.executable, "-m", "bin.train", "--config=configs/demo.py:debug", *hosts, *flags]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("process", [0, 1])
def test_a_run_whose_other_host_is_missing_ends_with_one_line(address, tmp_path, process):
    started = _train(
        address,
        "--dry-run",
        f"--config.run_dir={tmp_path}",
        "--config.hosts.timeout_s=2",
        f"--config.hosts.process={process}",
    )
    out, err = started.communicate(timeout=HANGS_S)
    missing = (
        "process 1 of 2 did not come to" if process == 0 else "process 1 did not find process 0 at"
    )
    [line] = [line for line in err.splitlines() if line]
    assert line.startswith(f"error: config.hosts.coordinator: {missing} {address} in 2 s"), (
        out + err
    )
    assert started.returncode == 2


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_jax_listens_at_the_named_address_alone(address, tmp_path):
    """Two processes meet and JAX's service is the only listener left, on 127.0.0.1."""
    program = """
import sys, time
import jax
from dcmdp_jax.parallel.hosts import join_hosts
jax.config.update("jax_num_cpu_devices", 1)
address, number = sys.argv[1], int(sys.argv[2])
with join_hosts(address, 2, number, 20.0) as hosts:
    if number == 0:
        wanted = f"{int(address.split(':')[1]):04X}"
        for name in ("tcp", "tcp6"):
            for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and local.endswith(":" + wanted):
                    print("listens", name, local.split(":")[0])
    hosts.wait_for_all()
"""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(number)],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]
    (out, err), (_, other_err) = (process.communicate(timeout=HANGS_S) for process in started)
    assert [process.returncode for process in started] == [0, 0], err + other_err
    listening = {line for line in out.splitlines() if line.startswith("listens")}
    # Linux writes 127.0.0.1 in the machine's byte order; IPv6 may hold it as a mapped address.
    assert listening and listening <= {
        "listens tcp 0100007F",
        "listens tcp6 0000000000000000FFFF00000100007F",
    }, out


def test_auto_meets_where_slurm_says_and_refuses_where_nothing_says(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "JAX_COORD"))]:
        monkeypatch.delenv(name)
    with (
        pytest.raises(
            UserError, match="^coordinator: got 'auto', and JAX finds no SLURM, TPU pod or Open"
        ),
        join_hosts("auto", 1, 0, 2.0),
    ):
        pass
    slurm = (
        "JOB_ID=7 STEP_NODELIST=localhost NTASKS=2 PROCID=0 LOCALID=0 STEP_NUM_NODES=2 "
        "GPUS_ON_NODE=4"
    )
    slurm = {f"SLURM_{name}": value for name, value in (word.split("=") for word in slurm.split())}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    coordinator, processes, process, local_devices = _find_out(2)
    assert (coordinator.split(":")[0], processes, process, list(local_devices)) == (
        "localhost",
        2,
        0,
        [0, 1, 2, 3],
    )
    with (
        pytest.raises(UserError, match=f"process 1 of 2 did not come to {coordinator} in 1 s"),
        join_hosts("auto", 1, 0, 1.0),
    ):
        pass

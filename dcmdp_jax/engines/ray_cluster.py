"""A Ray cluster: connect to one, or start one of this machine alone; leave it."""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

# Ray ends a process so long after the head of its cluster: never this one, as `check_head` says it
# in a line, and the run saves. It is read here; an own cluster's processes must not inherit it.
_LIMIT = "gcs_rpc_server_reconnect_timeout_s"
_LIMIT_S = 86400
_REACH_S = 10.0
"""Time in which an address must take a connection."""
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", f"RAY_{_LIMIT}": str(_LIMIT_S)}

import ray  # noqa: E402

del os.environ[f"RAY_{_LIMIT}"]


from dcmdp_jax.errors import ArgumentError, one_line  # noqa: E402

# Where this process is killed, Ray's agents would look for their head for a minute: what has its
# password ends. Several times, since an actor that is starting gets it later. Then Ray's files go.
_REAPER = """exec 2>/dev/null; read _; token=${RAY_AUTH_TOKEN:?}; unset RAY_AUTH_TOKEN; \
for i in 1 2 3 4 5 6; do sleep 3
echo $token | grep -lFf - /proc/[0-9]*/environ | cut -d/ -f3 | grep -vx $$ | \
xargs -r kill -9; done; rm -rf "$0" """
# The directory of an own cluster and its reaper; the addresses of engines that are connected.
_own: list[Any] = []
_open: list[str] = []


def connect(address: str, **cluster_options: Any) -> None:
    """Connect to the cluster at an address, or start one of this machine, unless connected.

    Args:
        address: `rollout.vllm.address`.
        cluster_options: arguments of `ray.init` for a cluster of this machine alone; of an engine,
            which calls `disconnect` later.

    Raises:
        UserError: in one line, if nobody answers there in time, or with another version of Ray.
    """
    if cluster_options:
        _open.append(address)
    if ray.is_initialized():
        return
    options = {}
    if not address:
        # Loopback, and a password that only this run's processes are given: Ray asks for one here
        # by default.
        if not _own:
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
            directory = tempfile.mkdtemp(prefix="dcmdp-", dir="/tmp")  # sockets need short names
            reaper = subprocess.Popen(
                ["sh", "-c", _REAPER, directory], stdin=subprocess.PIPE, start_new_session=True
            )
            _own.extend((directory, reaper))
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
        options = cluster_options | {
            "include_dashboard": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": _own[0],
            # As sidecars: no nice 15, and ended by no monitor for the memory of other programs.
            "_system_config": {
                _LIMIT: _LIMIT_S,
                "worker_niceness": 0,
                "memory_monitor_refresh_ms": 0,
            },
        }
    # Where something else answers, a try takes 40 s.
    ray._private.ray_constants.NUM_REDIS_GET_RETRIES = 1 if address else 20
    try:
        if address not in ("", "auto"):
            reach(address.removeprefix("ray://"))
        # A loss is said in one line of ours, Ray's have twenty; and SIGTERM is the trainer's to
        # handle.
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
        ray._private.utils.set_sigterm_handler = lambda handler: None
        # Of fork beside JAX's threads: Ray's child calls exec at once.
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            ray.init(
                address=address or "local",
                # Every node gets this package, the trainer's own.
                runtime_env={"py_modules": [str(Path(__file__).parents[1])]},
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        # Ray's library, beneath Python's handlers, takes SIGTERM too, and aborts this process after
        # 3 s.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    except Exception as error:  # of many classes, with many lines
        fault = f"Ray {ray.__version__} does not connect: {one_line(error, 300)}"
        raise ArgumentError("address", f"got {address!r}: {fault}") from None


def reach(address: str) -> None:
    """Raise OSError if nobody takes a connection at HOST:PORT in time."""
    host, _, port = address.rpartition(":")
    name = host.removeprefix("[").removesuffix("]")
    socket.create_connection((name, int(port)), _REACH_S).close()


def disconnect() -> None:
    """End an engine's connection; the last one's ends this process's, and an own cluster."""
    _open.pop()
    if not _open:
        ray.shutdown()
        if _own:
            shutil.rmtree(_own[0], ignore_errors=True)  # what is in use yet, the reaper removes

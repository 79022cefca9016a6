"""The GPUs that each replica gets, by hand."""

import dataclasses

import pytest

from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm import devices as vllm_devices


@pytest.fixture
def devices(monkeypatch):
    """devices(named, present, platform, settings...) -> devices of each replica."""

    def of(named=None, *, present=0, platform="cuda", **changes):
        if named is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        monkeypatch.setattr(
            vllm_devices, "present_gpus", lambda: [str(number) for number in range(present)]
        )
        return vllm_devices.devices_of_replicas(
            dataclasses.replace(VllmSettings(), **changes), platform
        )

    return of


def test_each_replica_has_the_next_gpus(devices):
    assert devices(present=8, replicas=4, tensor_parallel_size=2) == ["0,1", "2,3", "4,5", "6,7"]
    assert devices(present=8, replicas=3) == ["0", "1", "2"]


def test_named_gpus_come_first_then_the_trainers_then_all(devices):
    assert devices("0,1", present=8, replicas=2, visible_devices="4, 5") == ["4", "5"]
    assert devices("6,7", present=8, replicas=2) == ["6", "7"]
    assert devices("", present=2, replicas=2) == ["0", "1"]
    assert devices(replicas=2, visible_devices="GPU-a,GPU-b") == ["GPU-a", "GPU-b"]


def test_the_only_replica_takes_what_is_there(devices):
    assert devices(present=8, tensor_parallel_size=4) == [""]
    assert devices("2,3", present=8) == [""]
    assert devices(present=8, visible_devices="4,5") == ["4,5"]
    assert devices() == [""]


def test_without_a_number_there_are_as_many_replicas_as_the_gpus_hold(devices):
    assert devices(present=4, replicas=0) == ["0", "1", "2", "3"]
    assert devices(present=9, replicas=0, tensor_parallel_size=4) == ["0,1,2,3", "4,5,6,7"]
    assert devices("6,7", present=8, replicas=0) == ["6", "7"]
    assert devices(present=8, replicas=0, visible_devices="1,2") == ["1", "2"]
    assert devices(platform="cpu", replicas=0) == [""] and devices(replicas=0) == [""]
    with pytest.raises(ValueError, match="got 1 of .*=4 devices each, and there are 2"):
        devices(present=2, replicas=0, tensor_parallel_size=4)


def test_a_cpu_has_nothing_to_divide(devices):
    assert devices(platform="cpu", replicas=3, tensor_parallel_size=2) == ["", "", ""]


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        (
            {"present": 8, "replicas": 5, "tensor_parallel_size": 2},
            "got 5 of .*=2 devices each, and there are 8 .*, not 10",
        ),
        (
            {"present": 1, "tensor_parallel_size": 2},
            r"got 1 of .*=2 devices each, and there are 1 \(0\), not 2",
        ),
        (
            {"present": 8, "replicas": 2, "visible_devices": "7"},
            r"got 2 of .*=1 devices each, and there are 1 \(7\), not 2",
        ),
    ],
)
def test_replicas_that_do_not_fit(devices, changes, numbers):
    """Otherwise two engines share a GPU, and the second fails minutes later with an allocator's
    message.
    """
    with pytest.raises(ValueError, match=f"^replicas: {numbers}; lower one") as raised:
        devices(**changes)
    assert "\n" not in str(raised.value)


def test_gpus_that_cannot_be_counted_must_be_named(devices):
    with pytest.raises(ValueError, match="^replicas: got 2, and no GPU is seen here; name theirs"):
        devices(replicas=2)


def test_engines_of_a_cluster_share_no_gpu_with_the_trainer():
    """0.4 is a sidecar's share, which leaves the trainer half."""
    assert vllm_devices.device_share(VllmSettings()).trainer == 0.5
    assert vllm_devices.device_share(VllmSettings(placement="ray", address="auto")) is None

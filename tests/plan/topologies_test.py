"""Names of topologies, and the compilers for them where they are installed."""

import importlib.util

import pytest

from dcmdp_jax.errors import UserError
from dcmdp_jax.plan import topologies
from dcmdp_jax.plan.topologies import chip_and_count, load_topology


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("v5e:4x4", 16),
        ("v5p:4x4x2", 32),
        ("v6e:16x16", 256),
        ("h100:8", 8),
        ("h100:32", 32),
        ("h200:1", 1),
    ],
)
def test_the_number_of_devices(name, count):
    assert chip_and_count(name)[1] == count


@pytest.mark.parametrize(
    "name", ["v5e", "v4:2x2", "v5e:0x4", "v5p:4", "h100:2x4", "h100:", "v5e:4x4x4x4", "H100:8"]
)
def test_an_unknown_topology_is_told_with_those_known(name):
    with pytest.raises(UserError) as raised:
        chip_and_count(name)
    assert str(raised.value).startswith(f"--topology: got {name!r}, known are v5e:2x2, v5e:2x4, ")
    assert "h100:8" in str(raised.value)


def test_hosts_of_gpus_are_whole():
    with pytest.raises(
        UserError, match="got 'h100:12', more than 8 h100 must be a multiple of 8, a host each"
    ):
        chip_and_count("h100:12")


@pytest.mark.parametrize(
    ("name", "package"), [("v5e:4x4", "libtpu"), ("h100:8", "jax-cuda12-plugin")]
)
def test_a_compiler_that_is_not_installed(name, package, monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UserError) as raised:
        load_topology(name)
    assert str(raised.value) == (
        f"--topology: {name} needs the compiler in {package}, which is not installed: pip install "
        "'PATH_OF_A_CHECKOUT[plan]'"
    )


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra `plan`)"
)
def test_the_compiler_knows_a_tpu():
    topology = load_topology("v5e:2x2")
    assert len(topology.devices) == 4 and topology.devices[0].platform == "tpu"


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="jax-cuda12-plugin is not installed (extra `plan`)",
)
def test_the_compiler_knows_a_gpu():
    topology = load_topology("h100:16")
    assert len(topology.devices) == 16 and "H100" in topology.devices[0].device_kind

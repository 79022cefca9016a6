"""Builds of torch's companions that break vLLM: found without importing them, and named before the
engine starts.
"""

import sys

import pytest

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.vllm.start_checks import check_torch_builds
from tests.support.vllm_tools import random_params, small_model

_REMEDY = f"{sys.executable} -m pip uninstall -y torchvision torchaudio torchcodec"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, version, **{file: bytes}): a distribution that is found before any other, here
    and in children.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, version: str, files: dict[str, bytes]) -> None:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            path = tmp_path / name / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        information = tmp_path / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (information / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in files))

    return write


_CPU_TORCH = {"lib/libtorch_cpu.so": b"\x7fELF"}
_CUDA_TORCH = {**_CPU_TORCH, "lib/libtorch_cuda.so": b"\x7fELF"}
# What a dynamic section holds: names of libraries between zero bytes.
_CUDA_MODULE = {"__init__.py": b"", "_C.so": b"\x7fELF\0libc10.so\0libtorch_cuda.so\0"}
_CPU_MODULE = {
    "__init__.py": b"libtorch_cuda.so",
    "_C.so": b"\x7fELF\0libc10.so\0libtorch_cpu.so\0",
}


def test_cuda_builds_beside_the_cpu_build_of_torch_are_named_with_the_command_that_removes_them(
    install,
):
    """As the package index has them: no tag in the version says what they are. The one that fits is
    not named.
    """
    install("torch", "2.13.0+cpu", _CPU_TORCH)
    install("torchvision", "0.28.0", _CUDA_MODULE)
    install("torchaudio", "2.11.0", _CPU_MODULE)
    install("torchcodec", "0.17.0", {"core.so": b"\0libtorch_cuda.so\0"})
    with pytest.raises(RuntimeError) as refused:
        check_torch_builds()
    assert str(refused.value) == (
        "torchvision 0.28.0, torchcodec 0.17.0: CUDA builds, which can't be imported beside the "
        f"CPU build of torch 2.13.0+cpu; vLLM runs without them: {_REMEDY}"
    )


@pytest.mark.parametrize(
    ("torch", "module"),
    [(_CPU_TORCH, _CPU_MODULE), (_CUDA_TORCH, _CUDA_MODULE), (_CUDA_TORCH, _CPU_MODULE)],
)
def test_builds_that_fit_pass(install, torch, module):
    install("torch", "2.13.0", torch)
    for name in ("torchvision", "torchaudio", "torchcodec"):
        install(name, "1.0", module)
    check_torch_builds()


def test_the_environment_of_the_tests_passes(vllm_is_installed):
    check_torch_builds()


def test_the_sidecar_says_it_before_it_starts_the_engine(install, start):
    install("torchvision", "0.28.0", _CUDA_MODULE)
    with pytest.raises(EngineError) as refused:
        start(small_model())
    line = str(refused.value)
    assert (
        line.startswith("vLLM does not start: RuntimeError: torchvision 0.28.0: CUDA builds, ")
        and "\n" not in line
    )
    assert f"vLLM runs without them: {_REMEDY}; its log is " in line


@pytest.mark.long
def test_a_sidecar_starts_with_empty_caches(start, tmp_path, monkeypatch):
    """As on a new machine: vLLM then inspects the model's class in a process of its own, out of our
    reach.
    """
    for name in ("HOME", "XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "HF_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    engine = start(small_model("qwen2"))
    engine.sync_weights(random_params(engine.config, 0), 0)
    assert list((tmp_path / "VLLM_CACHE_ROOT").rglob("*.json")), (
        "vLLM keeps its answer somewhere else now"
    )

"""What vLLM's CPU build computes on this machine's processor, by the product's own rule, and on
pretended ones.

    python -m pytest -p tests.support.processors -rs FILES

makes those tests of the files that need vLLM's CPU build, on each of `PROCESSORS`, up to a start of
vLLM: it is left out and named. A test fails that would start what the processor does not compute.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.engines.vllm import launch
from dcmdp_jax.errors import UserError
from dcmdp_jax.parallel import backend

_AVX2 = "fpu sse sse2 ssse3 fma sse4_1 sse4_2 avx f16c bmi1 avx2 bmi2"
_AVX512 = f"{_AVX2} avx512f avx512dq avx512cd avx512bw avx512vl avx512_vnni avx512_bf16"
PROCESSORS = {"avx2": _AVX2, "avx512": _AVX512, "amx": f"{_AVX512} amx_bf16 amx_tile amx_int8"}
"""Name -> instruction sets, as /proc/cpuinfo lists them."""

WEIGHTS = ("int8", "fp8_per_block")
CACHES = ("fp8", "fp8_e5m2")
_FORMATS = {"float32", "float16", "bfloat16", "auto", *WEIGHTS, *CACHES}
REFUSED = {"avx2": {*WEIGHTS, *CACHES}, "avx512": {*WEIGHTS}, "amx": set()}
"""Name -> the precisions and caches that vLLM's CPU build does not compute there."""


def pretend(features: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the product read these instruction sets as the processor's."""
    info = directory / "cpuinfo"
    info.write_text(
        f"processor\t: 0\nmodel name\t: pretended, with avx512f amx_tile\nflags\t\t: {features}\n"
    )
    monkeypatch.setattr(backend, "CPU_INFO", info)


def skip_unless_computed(precision: str, kv_cache_dtype: str = "auto") -> None:
    """Skip what vLLM's CPU build does not compute on this processor, in the product's words."""
    try:
        launch.check_processor(precision, kv_cache_dtype, "cpu")
    except UserError as refused:
        pytest.skip(f"vLLM on this processor: {refused}")


# The plugin. It stops where vLLM would be started, in this process or by another one.

# Of vLLM, in the words of a command or its program: the server, an engine, a kernel.
_STARTS = ("vllm.entrypoints", "VllmEngine(", "LLM(", "torch.ops._C")
_pretended: list[str] = []


def _would_start(*formats: str) -> None:
    """End a test that has come to a start of vLLM: fail if the pretended processor does not compute
    the formats.
    """
    [name] = _pretended
    if refused := REFUSED[name] & set(formats):
        pytest.fail(f"would start vLLM with {', '.join(refused)} on a processor with {name}")
    pytest.skip(f"{name} would start vLLM with {' '.join(set(formats) & _FORMATS)}")


class _Popen(subprocess.Popen):
    def __init__(self, command: Sequence[str] | str, *rest: object, **options: object) -> None:
        words = [command] if isinstance(command, str) else list(map(str, command))
        settings = [word for word in words if word.startswith("--config")]
        if settings and (rollout := parse(["train", *settings]).config.rollout).engine == "vllm":
            _would_start(rollout.precision, rollout.kv_cache_dtype)
        if any(place in word for word in words for place in _STARTS):
            _would_start(*re.findall(r"\w+", " ".join(words)))
        super().__init__(command, *rest, **options)


@pytest.fixture(scope="session", params=PROCESSORS, autouse=True)
def _pretended_processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """The tests of a session on one processor, then on the next."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as directory:
        pretend(PROCESSORS[request.param], Path(directory), patch)
        patch.setattr(
            launch,
            "write_model_config",
            lambda one: _would_start(one.precision, one.kv_cache_dtype),
        )
        patch.setattr(subprocess, "Popen", _Popen)
        _pretended[:] = [request.param]
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what needs vLLM's CPU build."""
    kept = [item for item in items if "vllm_is_installed" in item.fixturenames]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept

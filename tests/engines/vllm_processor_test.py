"""What vLLM's CPU build computes on processors of three kinds, and that no test starts another."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dcmdp_jax.commands import train
from dcmdp_jax.engines.vllm import launch
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.parallel import backend
from dcmdp_jax.probe.live.engines import parse_spec
from tests.support.commands import run_command
from tests.support.processors import CACHES, PROCESSORS, REFUSED, WEIGHTS, pretend
from tests.support.refusals import refused
from tests.support.runs import ROOT
from tests.support.waiting import HANGS_S

_FORMATS = [
    *((each, "auto") for each in ("float32", "float16", "bfloat16", *WEIGHTS)),
    *(("bfloat16", each) for each in CACHES),
]


def _says(precision, cache):
    try:
        launch.check_processor(precision, cache, "cpu")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PROCESSORS)
def test_weights_in_8_bits_need_amx_and_a_cache_in_fp8_needs_avx512_or_amx(
    name, tmp_path, monkeypatch
):
    """Without AMX vLLM takes 8-bit weights, and computes with wrong ones after an update."""
    pretend(PROCESSORS[name], tmp_path, monkeypatch)
    for formats in _FORMATS:
        launch.check_processor(*formats, "cuda")
    said = {formats: _says(*formats) for formats in _FORMATS}
    assert {formats for formats in _FORMATS if said[formats]} == {
        formats for formats in _FORMATS if REFUSED[name] & set(formats)
    }
    for (precision, cache), line in filter(lambda one: one[1], said.items()):
        start = (
            f"kv_cache_dtype: got {cache!r}" if cache in CACHES else f"precision: got {precision!r}"
        )
        assert (
            line.startswith(f"{start}, which vLLM's CPU build computes with ") and "\n" not in line
        )


def test_fp8_per_tensor_is_refused_in_the_cpu_build():
    line = refused(launch.check_processor, "fp8", "auto", "cpu")
    assert line.startswith("precision: got 'fp8', which vLLM's CPU build can't compute; choose")
    launch.check_processor("fp8", "auto", "cuda")


def test_part_of_avx512_is_not_enough(tmp_path, monkeypatch):
    """A Xeon Phi: vLLM asks torch, which needs the instructions on bytes and words too."""
    pretend(PROCESSORS["avx512"].replace("avx512bw", "avx512pf"), tmp_path, monkeypatch)
    assert _says("bfloat16", "fp8").startswith("kv_cache_dtype: got 'fp8', which")


def test_the_rule_is_what_torch_finds_on_this_processor():
    torch = pytest.importorskip("torch", reason="torch is not installed (extra test)")
    tiles = torch.cpu._is_amx_tile_supported()
    wide = tiles or torch.cpu._is_avx512_supported()
    found = dict.fromkeys(WEIGHTS, tiles) | dict.fromkeys(CACHES, wide)
    says = {each: not _says(each, "auto") for each in WEIGHTS} | {
        each: not _says("float32", each) for each in CACHES
    }
    if os.path.ismount(
        backend.CPU_INFO
    ):  # by a container, or for a pretended processor: it may list fewer
        found = {each: has and says[each] for each, has in found.items()}
    assert says == found


@pytest.mark.parametrize("dry_run", [("--dry-run",), ()], ids=["plan", "run"])
def test_a_run_with_a_cache_in_fp8_is_refused_before_anything_starts(
    dry_run, tmp_path, monkeypatch, capsys
):
    pretend(PROCESSORS["avx2"], tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "installed_vllm", lambda python: ("0.32.0", "cpu"))
    monkeypatch.setattr(VllmEngine, "__init__", None)
    code, said, line = run_command(
        train.main,
        "train",
        capsys,
        "--config=configs/demo_vllm.py:fp8_kv",
        f"--config.run_dir={tmp_path / 'run'}",
        *dry_run,
    )
    assert (code, said, line.count("\n"), (tmp_path / "run").exists()) == (2, "", 1, False)
    assert line.startswith(
        "error: config.rollout.kv_cache_dtype: got 'fp8', which vLLM's CPU build computes with AVX-"
    )


def test_the_probe_of_the_demo_has_what_each_processor_computes():
    """`make demo-probe`: BF16 everywhere, then the cache in FP8, then the weights too."""
    recipe = (
        (ROOT / "Makefile")
        .read_text(encoding="utf-8")
        .partition("\ndemo-probe:")[2]
        .partition("\n\n")[0]
    )
    specs = [parse_spec(spec) for spec in re.findall(r"--a=(\S+)", recipe)]
    counts = {
        name: sum(not REFUSED[name] & {spec.precision, spec.cache} for spec in specs)
        for name in PROCESSORS
    }
    assert counts == {"avx2": 1, "avx512": 2, "amx": 3}


def test_no_test_starts_a_vllm_that_the_processor_does_not_compute(vllm_is_installed):
    """Each test that needs vLLM's CPU build, long ones too, up to the start, which is left out; not
    in Ray.
    """
    others = set((ROOT / "tests").rglob("*_test.py")) - {Path(__file__)}
    files = [
        path
        for path in sorted(others)
        if "vllm" in path.read_text() and not path.name.startswith("ray_")
    ]
    options = ("-q", "-rs", "-m", "long or not long", "-p", "no:cacheprovider", "-p", "no:xdist")
    command = [sys.executable, "-m", "pytest", *options, "-p", "tests.support.processors", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stdout[-3000:]
    started = re.findall(r"(\w+) would start vLLM with (.*)", done.stdout)
    # What the processor computes is started: the tests get that far.
    for name in PROCESSORS:
        formats = {word for each, words in started if each == name for word in words.split()}
        assert formats & {*WEIGHTS, *CACHES} == {*WEIGHTS, *CACHES} - REFUSED[name], name

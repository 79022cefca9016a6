"""The arguments for GPUs, read by vLLM's own parser and config, as far as its CPU build does
that.
"""

import dataclasses
import json
import os
import subprocess
import sys

from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import launch
from tests.support.vllm_tools import TOTAL, small_model, vllm_settings
from tests.support.waiting import HANGS_S

_READ = """
import json, sys
from vllm.engine.arg_utils import EngineArgs

if __name__ == "__main__":
    found = []
    for arguments in json.load(sys.stdin):
        try:
            config = EngineArgs(**arguments).create_engine_config()
        except ValueError as error:
            found.append(str(error))
        else:
            scheme = getattr(config.quant_config, "args", None)
            found.append([config.model_config.quantization, scheme and str(scheme.linear)])
    print("found", json.dumps(found))
"""


def test_a_small_models_cache_does_not_fill_a_gpu(tmp_path):
    """vLLM goes through all blocks of its cache at each weight sync and call. By hand, of 56 + 1
    tokens, so two blocks of 32:

    2 * 30 layers * 3 heads * 64 * 2 bytes * 64 tokens * (64 + 1) rows = 95,846,400 bytes; 513 rows:
    756 MB.
    """

    def cache(rows, **changes):
        model = dataclasses.replace(
            small_model(), num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64
        )
        place = dict(settings=vllm_settings(**changes), directory=tmp_path, platform="cuda")
        engine = EngineArguments(
            "bfloat16", "bfloat16", max_total_tokens=56, max_rows=rows, model=model, **place
        )
        return launch.engine_arguments(engine).get("kv_cache_memory_bytes")

    assert [cache(64), cache(512), cache(1024)] == [2 * 95_846_400, 2 * 756_449_280, None]
    assert cache(64, kv_cache_gib=0.5) == 2**29


def test_vllm_takes_the_arguments_for_gpus(vllm_is_installed, tmp_path):
    """FP8 becomes vLLM's online quantization with a scale per tensor; sleep mode is known, and
    wants a GPU.
    """
    config = small_model()
    script = tmp_path / "read.py"
    script.write_text(_READ)

    def arguments(precision, **changes):
        place = dict(
            settings=vllm_settings(**changes), directory=tmp_path / precision, platform="cuda"
        )
        engine = EngineArguments(
            precision, "bfloat16", max_total_tokens=TOTAL, max_rows=64, model=config, **place
        )
        launch.write_model_config(engine)
        return launch.engine_arguments(engine)

    asked = [
        arguments("bfloat16"),
        arguments("fp8"),
        arguments("fp8_per_block"),
        arguments("bfloat16", sleep=2),
    ]
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env={
            **os.environ,
            **launch.environment(EngineArguments(settings=vllm_settings(), platform="cpu")),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    plain, tensor, block, sleep = json.loads(line.removeprefix("found "))
    assert plain == [None, None]
    assert (tensor, block) == (
        ["online", "fp8_per_tensor_static"],
        ["online", "fp8_per_block_static"],
    )
    assert "Sleep mode is not supported on current platform" in sleep

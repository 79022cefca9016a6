"""Shared by the tests of the vLLM sidecar: small sharp models, settings, and a check of what is
left behind.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs.base import get_config
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.engines.vllm_common import request_seeds
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params
from dcmdp_jax.models.row_logprobs import Probe, make_probe
from dcmdp_jax.parallel.mesh import one_device_mesh
from dcmdp_jax.types import Params
from tests.support.sampling import Rollout
from tests.support.waiting import HANGS_S

TOTAL = 64
ROWS = 64
STOP = 3


def vllm_settings(**changes: object) -> VllmSettings:
    """Those of configs/base.py, with changes."""
    return dataclasses.replace(VllmSettings(**get_config().rollout.vllm.to_dict()), **changes)


def small_model(family: str = "qwen3", *, tied: bool = True, vocab_size: int = 64) -> ModelConfig:
    """Sharp enough that a wrong weight changes a greedy completion."""
    heads = 4 if family == "qwen3" else 2  # vLLM's Qwen2 has heads of hidden_size / heads
    others = dict(
        attention_bias=family == "qwen2", max_position_embeddings=TOTAL, initializer_range=0.15
    )
    return ModelConfig(
        family, vocab_size, 64, 96, 2, heads, 2, 32, tie_word_embeddings=tied, **others
    )


EXPERTS = dataclasses.replace(
    small_model("qwen3"),
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


def random_params(config: ModelConfig, seed: int) -> Params:
    """Biases and norms random too: a fresh model has them 0 and 1, which hides a swap."""
    params = init_params(config, jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 10_000), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            leaf + 0.02 * jax.random.normal(key, leaf.shape)
            for leaf, key in zip(leaves, keys, strict=True)
        ],
    )


def trainer_probe(config: ModelConfig) -> Probe:
    """The training stack's, in float32, on one device."""
    return make_probe(config, Compute(), one_device_mesh())


def pid_of(engine: VllmEngine, replica: int = 0) -> int | None:
    """The process of a replica's sidecar; None while it is restarted."""
    sidecar = engine.replicas[replica].supervisor.sidecar
    return None if sidecar is None else sidecar.pid


def sidecars(parent: int | None = None) -> set[int]:
    """Living processes that run a sidecar for this process or another one, orphaned or not."""
    argument = str(parent or os.getpid()).encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if b"sidecar.py" in command and command.split(b"\0")[-2] == argument and state != "Z":
                found.add(int(entry.name))
    return found


def left_behind() -> set[str]:
    """Things a sidecar could leave: shared memory with a name, files and sockets in the temporary
    directory.

    Not Python's own temporary files: a sidecar has a directory of its own for these, and other
    processes have them.
    """
    return {
        f"{place}/{name}"
        for place in ("/dev/shm", "/tmp")
        for name in os.listdir(place)
        if name.startswith(("psm_", "sem.", "vllm", "torch", "dcmdp", "gloo", "pymp", "ompi"))
    }


def memory_files() -> set[str]:
    """Weight segments that this process still holds."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if "dcmdp-weights" in target:
            found.add(f"{entry} {target}")
    return found


def prompts(count: int, config: ModelConfig, seed: int = 0) -> list[np.ndarray]:
    """Random prompts of 3 to 16 tokens."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, config.vocab_size, int(n)).astype(np.int32)
        for n in rng.integers(3, 17, count)
    ]


def shared_memory_of(group: int) -> set[Path]:
    """Shared memory with a name that the processes of a group have mapped."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                for line in (entry / "maps").read_text(encoding="utf-8").splitlines():
                    if "/dev/shm/" in line and not line.endswith("(deleted)"):
                        found.add(Path("/dev/shm") / line.partition("/dev/shm/")[2])
    return found


def fresh_answers(
    directory: Path,
    checkpoints: list[Path],
    asked: list[np.ndarray],
    samplings: tuple[SamplingParams, ...],
    *,
    seed: int,
    llm: dict[str, Any],
) -> list[Any]:
    """Answers of stock vLLM to step 0, from an engine of its own for each checkpoint (see
    fresh_vllm.py).

    Args:
        directory: for the request and the answer.
        checkpoints: Hugging Face directories.
        asked: prompts.
        samplings: with one completion per prompt; a seed per request where the temperature is not
            0.
        seed: of the call that these answers are compared with.
        llm: arguments of `vllm.LLM` besides those that all tests have.

    Returns:
        Per checkpoint, sampling and prompt [token ids, log-probs as float.hex].
    """
    seeds = request_seeds(seed, 0, np.arange(len(asked))).tolist()
    request = {
        "directories": [str(checkpoint) for checkpoint in checkpoints],
        "llm": {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": TOTAL + 1,
            "max_num_seqs": ROWS,
            "kv_cache_memory_bytes": 1 << 26,
            "block_size": 32,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 8192,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            **llm,
        },
        "prompts": [ids.tolist() for ids in asked],
        "samplings": [
            {
                "max_tokens": sampling.max_completion_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "temperature": sampling.temperature,
                "ignore_eos": True,
                "detokenize": False,
                **({"seeds": seeds} if sampling.temperature else {}),
            }
            for sampling in samplings
        ],
    }
    given = directory / "request.json"
    answer = directory / "answer.json"
    given.write_text(json.dumps(request))
    script = Path(__file__).with_name("fresh_vllm.py")
    command = [sys.executable, str(script), str(given), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answer.read_text())


def assert_same_bits(live: list[list[Rollout]], fresh: list[Any]) -> None:
    """Asserts that rollouts, per weight sync and sampling, are `fresh_answers` to the bit."""
    for push, (rollouts, answers) in enumerate(zip(live, fresh, strict=True)):
        for kind, (rollout, outputs) in enumerate(zip(rollouts, answers, strict=True)):
            for prompt, (tokens, logprobs) in enumerate(outputs):
                where = f"push {push}, sampling {kind}, prompt {prompt}"
                assert tokens == rollout.completion_ids[prompt].tolist(), where
                assert [float.fromhex(x) for x in logprobs] == rollout.rollout_logprobs[
                    prompt
                ].tolist(), where

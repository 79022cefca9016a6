"""Seconds of a weight sync to vLLM replicas: sidecars beside actors on two Ray nodes of this
machine, in the CPU build.

    python -m benchmarks.ray_push --replicas 1,2,4 --repeats 5

Parameters and weights in bfloat16, without the probe. A row for each number of replicas: median and
spread of weight syncs after the first, and sampled tokens a second of 64 prompts. A bandwidth
between hosts is not measured. 67 MB on two busy cores: 0.108 s by sidecars and 0.189 s by Ray with
one replica, 0.175 and 0.333 s with two, 0.178 and 0.357 s with four.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks.arguments import at_least_one
from benchmarks.timing import median_and_spread
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.ray_cluster import ray
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.engines.vllm.engine import VllmEngine
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import init_params, num_params

_MODEL = ModelConfig("qwen3", 16384, 512, 1536, 8, 8, 4, 64, tie_word_embeddings=True)
_TOTAL = 64
_SAMPLED = SamplingParams(group_size=1, max_completion_tokens=32, stop_token_ids=(0,))


@contextlib.contextmanager
def _engine(settings: VllmSettings) -> Iterator[VllmEngine]:
    with tempfile.TemporaryDirectory() as directory:
        sizes = {"max_total_tokens": _TOTAL, "max_rows": 64, "directory": Path(directory)}
        engine = VllmEngine(
            EngineArguments("bfloat16", "bfloat16", model=_MODEL, settings=settings, **sizes)
        )
        try:
            yield engine
        finally:
            engine.close()


@contextlib.contextmanager
def _two_nodes(replicas: int) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 1 << 28}
    )
    for _ in range(2):
        cluster.add_node(
            num_cpus=0, resources={"vllm": -(-replicas // 2)}, object_store_memory=1 << 28
        )
    try:
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def _measure(settings: VllmSettings, params: object, repeats: int) -> str:
    prompts = [np.arange(1, 17, dtype=np.int32) + row for row in range(64)]
    syncs = []
    rates = []
    with _engine(settings) as engine:
        for version in range(repeats + 1):
            began = time.perf_counter()
            engine.sync_weights(params, version)
            synced = time.perf_counter()
            found = [
                episode
                for group in engine.generate(prompts, _SAMPLED, seed=0, step=version)
                for episode in group
            ]
            sampled = sum(int(episode.sampled_mask.sum()) for episode in found)
            if version:
                syncs.append(synced - began)
                rates.append(sampled / (time.perf_counter() - synced))
    return f"{median_and_spread(syncs, '.3f')} | {median_and_spread(rates, ',.0f')}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--repeats", type=at_least_one, default=5)
    arguments = parser.parse_args()
    params = jax.block_until_ready(init_params(_MODEL, jax.random.key(0)))
    print(f"{num_params(_MODEL):,} parameters\n")
    print(
        "| replicas | sidecars: weight sync, s | tokens / s | Ray, two nodes: weight sync, s | tokens / s "
        "|\n|---|---|---|---|---|"
    )
    for count in map(int, arguments.replicas.split(",")):
        settings = VllmSettings(replicas=count)
        local = _measure(settings, params, arguments.repeats)
        with _two_nodes(count) as address:
            there = dataclasses.replace(settings, placement="ray", address=address)
            print(
                f"| {count} | {local} | {_measure(there, params, arguments.repeats)} |", flush=True
            )


if __name__ == "__main__":
    main()

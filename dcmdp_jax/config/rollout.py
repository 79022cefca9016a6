"""Settings of the inference engines, declared once each as in `config/settings.py`, of which they are a part."""

from __future__ import annotations

import dataclasses

from dcmdp_jax.config.fields import setting

ENGINES = ("local", "vllm")
QUANTIZED = {"local": ("int8", "int4", "fp8"), "vllm": ("int8", "fp8", "fp8_per_block")}
"""Engine -> precisions with quantized weights. Those of the local engine are `models.quantize`'s."""

MOST_TOKENS = (2**20, "models read up to a million tokens")
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = (100, "beyond it every token is about as likely")
_WEEK = (604800, "a week")
_DECODED = (65536, "an engine decodes hundreds or thousands at a time")


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """The vLLM sidecar, used with `rollout.engine=vllm`."""

    python: str = setting("", "Python interpreter that has vLLM. Empty: the trainer's.", free=True)
    tensor_parallel_size: int = setting(
        1, "Devices that each layer is split over.", unit="devices", minimum=1, limit=(1024, "each is a device")
    )
    replicas: int = setting(
        1, "Data-parallel sidecars, each with tensor_parallel_size devices of its own. Prompt p goes to replica p mod "
        "replicas; all load one copy of the weights. 0: as many as the GPUs (or named chips) hold, 1 on a CPU.",
        unit="sidecars", minimum=0, limit=(1024, "each is an engine with devices of its own"), free=True,
    )  # fmt: skip
    visible_devices: str = setting(
        "", "GPUs (as CUDA_VISIBLE_DEVICES) or TPU chips of the sidecars. Empty: the trainer's GPUs, shared; a TPU "
        "needs them named.", free=True,
    )  # fmt: skip
    memory_share: float = setting(
        0.4, "Share of each of its GPUs. On a shared GPU the trainer gets the rest less a tenth.", source="ours",
        minimum=0.01, maximum=1, free=True,
    )  # fmt: skip
    sleep: int = setting(
        0,
        "vLLM's sleep mode, which leaves shared GPUs to the trainer while nothing is sampled. 0: off. 1: weights move "
        "to host memory. 2: weights are dropped, and loaded again. Frees nothing in the CPU build.",
        source="ours", minimum=0, maximum=2, free=True,
    )  # fmt: skip
    kv_cache_gib: float = setting(
        0.0,
        "Size of each replica's key-value cache. 0: what memory_share leaves on a GPU; what max_rows need on a CPU, at "
        "most a third of the free memory.",
        unit="GiB", minimum=0, limit=(65536, "64 TiB"), free=True,
    )  # fmt: skip
    cpu_threads: int = setting(
        1, "Threads of the CPU build. More than one is slow on a machine that does anything else.", unit="threads",
        minimum=1, limit=(1024, "each is a thread"), free=True,
    )  # fmt: skip
    engine_args: str = setting("", 'Further arguments of vllm.LLM as a JSON object, such as {"block_size": 64}.')
    start_timeout_s: float = setting(
        600.0, "Longest start of an engine; the first one that takes longer ends the run, a later one is tried again.",
        unit="seconds", minimum=1, limit=_WEEK, free=True,
    )  # fmt: skip
    stall_timeout_s: float = setting(
        300.0, "Time without a sign of life during a request, after which the engine is restarted.", unit="seconds",
        minimum=1, limit=_WEEK, free=True,
    )  # fmt: skip
    max_restarts: int = setting(
        5, "Restarts in a row without success, after which the run ends.", unit="restarts", minimum=0, free=True
    )
    probe_tolerance: float = setting(
        0.0,
        "Largest mean |difference| of log-probs between trainer and engine on fixed sequences after each push; above "
        "it the push failed. 0: 0.01 for float32, 0.2 for float16, 1 for bfloat16, 4 for 8-bit weights or "
        "cache.",
        unit="nats", source="ours", minimum=0, limit=(20, "log-ratios are clamped to 20 nats"), free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LocalSettings:
    """The embedded engine's mesh, used with `rollout.engine=local`. Devices that are left over split rows."""

    tensor: int = setting(
        1, "Devices that heads, MLP, vocabulary and cache are split over; divides the key-value heads.", unit="devices",
        minimum=1, limit=(1024, "each is a device"), free=True,
    )  # fmt: skip
    expert: int = setting(
        1, "Devices that the experts of each layer are split over.", unit="devices", minimum=1,
        limit=(1024, "each is a device"), free=True,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """The inference engine and the distribution it samples from."""

    engine: str = setting(
        "local", "Inference engine. local: in JAX, in the trainer's process. vllm: stock vLLM in its own process.",
        choices=ENGINES,
    )  # fmt: skip
    precision: str = setting(
        "bfloat16",
        "Weights of the engine. exact: the training stack recomputes the log-probs, so the discrepancy is 0. int8, "
        "int4 (in a byte), fp8 of the local engine: weights alone, quantized per output channel at each push; products "
        "are in compute_dtype, and a CPU dequantizes all weights in each program, which takes more memory than "
        "bfloat16. int8 of vLLM: W8A8, per channel and token. fp8 of vLLM, on GPUs: W8A8, per matrix and token; "
        "fp8_per_block: per block of 128.",
        engine_choices={
            "local": ("exact", "float32", "bfloat16", "float16", *QUANTIZED["local"]),
            "vllm": ("float32", "float16", "bfloat16", *QUANTIZED["vllm"]),
        },
    )  # fmt: skip
    compute_dtype: str = setting(
        "bfloat16", "Activations of the engine, and in vLLM all weights that are not quantized.",
        engine_choices=dict.fromkeys(ENGINES, ("float32", "bfloat16", "float16")),
    )  # fmt: skip
    kv_cache_dtype: str = setting(
        "auto", "Key-value cache. auto: compute_dtype. fp8: float8_e4m3fn.",
        engine_choices={"local": ("auto", "fp8"), "vllm": ("auto", "fp8", "fp8_e5m2")},
    )  # fmt: skip
    max_rows: int = setting(
        256, "Completions decoded at the same time, by all replicas; further ones wait.", unit="completions", minimum=1,
        limit=_DECODED, free=True,
    )  # fmt: skip
    min_rows: int = setting(
        32, "Embedded engine: when half of a batch is done, the rest moves to a batch of half the size, down to this "
        "size. The program of each size is compiled once.",
        unit="completions", minimum=1, limit=_DECODED, free=True,
    )  # fmt: skip
    group_size: int = setting(
        8, "G, completions of each prompt.", unit="completions", source="paper [6.1]: 8", minimum=2,
        limit=(65536, "the paper uses 8"), why="one completion has no group to be compared with",
    )  # fmt: skip
    max_completion_tokens: int = setting(
        8192, "Longest completion, end-of-sequence included.", unit="tokens", source="paper [6.1]: 8192", minimum=1,
        limit=MOST_TOKENS,
    )  # fmt: skip
    temperature: float = setting(
        1.0, "Sampling temperature.", source="paper [6.1]: 1.0", minimum=LOWEST_TEMPERATURE, limit=HIGHEST_TEMPERATURE,
        why="below it log-probs reach their clamp at -10000 nats, and at 0 all completions are the same",
    )  # fmt: skip
    on_non_finite: str = setting(
        "error", "A log-prob that is NaN or infinite: error stops and names the token, drop leaves the completion out "
        "and counts it.",
        choices=("error", "drop"), free=True,
    )  # fmt: skip
    router_replay: bool = setting(
        False, "Mixture of experts: the training stack uses the experts that the engine sent each token to (R3, "
        "docs/moe.md).", source="paper: off",
    )  # fmt: skip
    local: LocalSettings = LocalSettings()
    vllm: VllmSettings = VllmSettings()

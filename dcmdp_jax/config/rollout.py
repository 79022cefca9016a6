"""Settings of the inference engine and its sampling: a section of `config/settings.py`."""

import dataclasses

from dcmdp_jax.engines.local import LocalSettings
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.engines.vllm import VllmSettings
from dcmdp_jax.fields import setting

MOST_TOKENS = 2**20
"""Tokens of a prompt or a completion."""
LOWEST_TEMPERATURE = 0.01
"""Below it log-probs reach their clamp."""
HIGHEST_TEMPERATURE = 100
"""Above it sampling is all but uniform."""
TRAINABLE = {name: kind for name, kind in ENGINES.items() if kind.takes_weights}
"""The built-in engines that take the trainer's weights, by the value of `rollout.engine`."""


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """The inference engine and the distribution it samples from.

    Attributes:
        engine: Inference engine. local: in JAX, in the trainer's process. vllm: stock vLLM in its
            own process. http: a server of yours, for `dcmdp probe` and `dcmdp evaluate` alone
            (docs/vllm.md). Or one of yours, package.module:NAME or path.py:NAME
            (docs/extending.md).
        engine_args: Settings of an engine of yours as a JSON object, such as {"server":
            "http://..."}.
        precision: Weights of the engine. float32, bfloat16, float16: rounded to it. exact (local):
            the training stack recomputes the log-probs, so the discrepancy is 0. int8, int4, int3,
            int2 (in a byte), fp8 of the local engine: weights alone, quantized per output channel
            at each weight sync; mxfp8, mxfp4, nvfp4, nf4, int4_g32, int4_g128 in groups (in a byte;
            docs/remedies.md). On a CPU they take more memory than bfloat16. int8 of vLLM: W8A8, per
            channel and token. fp8 of vLLM, on GPUs: W8A8, per matrix and token; fp8_per_block: per
            block of 128.
        compute_dtype: float32, bfloat16 or float16: activations of the engine, and in vLLM all
            weights that are not quantized.
        kv_cache_dtype: Key-value cache. auto: compute_dtype. fp8: float8_e4m3fn; vLLM has fp8_e5m2
            too.
        max_rows: Completions decoded at the same time, by all replicas; further ones wait.
        min_rows: Embedded engine: when half of a batch is done, the rest moves to a batch of half
            the size, down to this size. The program of each size is compiled once. 0: 16 on a CPU,
            32 elsewhere.
        group_size: G, completions of each prompt. Source: paper [6.1]: 8.
        max_completion_tokens: Longest completion, end-of-sequence included. Source: paper [6.1]:
            8192.
        temperature: Sampling temperature. Source: paper [6.1]: 1.0.
        top_logprobs: For each sampled token also the log-probs of this many of the engine's
            top-k tokens, k: for exact measures of a state and for
            algorithm.corrections=score_centering (docs/distribution.md). 0: none. Source: paper:
            the sampled token's alone.
        top_p: Sample from the nucleus of this mass alone; the trainer's distribution is cut to the
            tokens that the engine kept (docs/distribution.md), which top_logprobs must hold all.
            Source: paper [6.1]: 1.0.
        top_k: Sample from this many top-k tokens alone, likewise; 0: all. Source: paper: not
            stated.
        on_non_finite: A log-prob that is NaN or infinite: error stops and names the token, drop
            leaves the completion out and counts it.
        lag: Steps that sampling runs ahead: a step trains on completions of the weights this many
            steps older, and the engine samples the next ones while it trains (docs/overlap.md). 0:
            they take turns. Source: paper: not stated.
        router_replay: Mixture of experts: the training stack uses the experts that the engine sent
            each token to (R3, docs/moe.md). Source: paper: off.
    """

    engine: str = setting("local")
    engine_args: str = setting("", free=True)
    precision: str = setting("bfloat16")
    compute_dtype: str = setting("bfloat16")
    kv_cache_dtype: str = setting("auto")
    max_rows: int = setting(256, unit="completions", minimum=1, free=True)
    min_rows: int = setting(0, unit="completions", minimum=0, free=True)
    group_size: int = setting(
        8,
        unit="completions",
        minimum=2,
        why="one completion has no group to be compared with",
    )
    max_completion_tokens: int = setting(8192, unit="tokens", minimum=1, maximum=MOST_TOKENS)
    temperature: float = setting(
        1.0,
        minimum=LOWEST_TEMPERATURE,
        maximum=HIGHEST_TEMPERATURE,
        why="below it log-probs reach their clamp",
    )
    top_logprobs: int = setting(0, unit="tokens", minimum=0, maximum=2**20)
    top_p: float = setting(1.0, minimum=1e-6, maximum=1)
    top_k: int = setting(0, unit="tokens", minimum=0, maximum=2**20)
    on_non_finite: str = setting("error", choices=("error", "drop"), free=True)
    lag: int = setting(0, unit="steps", minimum=0, maximum=64)
    router_replay: bool = setting(False)
    local: LocalSettings = LocalSettings()
    vllm: VllmSettings = VllmSettings()

    @property
    def cuts(self) -> bool:
        """Whether unlikely tokens are never sampled."""
        return self.top_p < 1 or self.top_k > 0

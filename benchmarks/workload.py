"""The models that the benchmarks measure, and the synthetic batch that the step's train on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.episode import Episode, single_turn
from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import RowShapes, make_row_shapes
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.lora import make_policy, trained
from dcmdp_jax.models.params import draw_params, init_params, num_params
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import training_mesh
from dcmdp_jax.parallel.sharding import batch_shardings, replicated
from dcmdp_jax.training.optimizer import make_optimizer, make_schedule
from dcmdp_jax.training.state import initial_dual, new_state, train_state_shardings
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from dcmdp_jax.types import Batch

# The peers' sizes: vocabulary, hidden, intermediate, layers, heads, key-value heads, head size.
SIZES = {
    "0.6M": (64, 128, 256, 4, 4, 2, 32),
    "9M": (4096, 256, 1024, 8, 4, 2, 64),
    "60M": (32768, 512, 2048, 12, 8, 4, 64),
    # SmolLM2-135M's.
    "135M": (49152, 576, 1536, 30, 9, 3, 64),
}

PROMPTS = 16
GROUP = 8
PROMPT_TOKENS = 16
NEW_TOKENS = 64
# Of all devices together: one group on each of two cores. More at a time take more memory and no
# less time.
LORA = Lora(16, 32.0)
_MICRO_BATCH_TOKENS = 16 * (PROMPT_TOKENS + NEW_TOKENS)


def model(size: str) -> ModelConfig:
    """A tied Qwen3 of about that many parameters."""
    return ModelConfig("qwen3", *SIZES[size], tie_word_embeddings=True)


def rollout(
    config: ModelConfig, prompt_tokens: int | Sequence[int], lengths: np.ndarray, group_size: int
) -> list[Episode]:
    """Random completions of the given lengths to prompts of one length, or of one for each."""
    rng = np.random.default_rng(0)
    count = len(lengths)
    sizes = np.broadcast_to(prompt_tokens, count // group_size)
    prompts = [rng.integers(0, config.vocab_size, size).astype(np.int32) for size in sizes]
    completions = [rng.integers(0, config.vocab_size, n).astype(np.int32) for n in lengths]
    logprobs = [rng.normal(-3.0, 0.5, n).clip(-9, -0.01).astype(np.float32) for n in lengths]
    places = [{"group": i // group_size, "member": i % group_size} for i in range(count)]
    return [
        single_turn(
            prompts[place["group"]], *sampled, policy_version=0, finish_reason="stop", **place
        )
        for *sampled, place in zip(completions, logprobs, places, strict=True)
    ]


def batch_of(sampled: list[Episode], plan: RowShapes, config: ModelConfig) -> tuple[Batch, float]:
    """The packed batch on the devices and its share of padding."""
    rewards = np.random.default_rng(1).integers(0, 2, len(sampled)).astype(np.float32)
    batch, (tokens, computed) = pack(sampled, rewards, plan, mask_truncated=False)
    shardings = batch_shardings(training_mesh(num_params=num_params(config)))
    return jax.device_put(batch, shardings), 1 - tokens / computed


def step_layout(
    config: ModelConfig, mini_batches: int, prompts: int = PROMPTS
) -> tuple[Compute, RowShapes]:
    """Settings and shapes of a step on `prompts` x 8 completions of 64 tokens: rows of one length,
    no padding.
    """
    compute = Compute(one_segment=True, scan_unroll=config.num_layers, logprob_chunk=2048)
    plan = make_row_shapes(
        row_lengths=(PROMPT_TOKENS + NEW_TOKENS,),
        micro_batch_tokens=micro_batch_tokens(config),
        mini_batches=mini_batches,
        completions=prompts * GROUP // mini_batches,
        segments_per_row=1,
        row_shards=training_mesh(num_params=num_params(config)).size,
    )
    return compute, plan


def micro_batch_tokens(config: ModelConfig) -> int:
    """Tokens of a micro-batch on each of the devices that the step of this model uses."""
    return _MICRO_BATCH_TOKENS // training_mesh(num_params=num_params(config)).size


def step_inputs(config: ModelConfig, mini_batches: int) -> tuple[Compute, Batch]:
    """The same with the batch itself."""
    compute, plan = step_layout(config, mini_batches)
    sampled = rollout(config, PROMPT_TOKENS, np.full(PROMPTS * GROUP, NEW_TOKENS), GROUP)
    return compute, batch_of(sampled, plan, config)[0]


def stepper(
    config: ModelConfig,
    method: str,
    compute: Compute,
    batch: Batch | Callable[[], Batch],
    max_completion_tokens: int = NEW_TOKENS,
    *,
    corrections: str = "",
    lora: Lora | None = None,
) -> Callable[[], object]:
    """A call that trains one more step on the batch, or on what it makes of it each time, from
    fresh parameters.

    With `lora` it trains fresh adapters over them.
    """
    settings = from_config_dict({"task": {"train": "none"}})
    algorithm = dataclasses.replace(settings.algorithm, method=method, corrections=corrections)
    schedule = make_schedule(settings.optimizer, updates=1000)
    optimizer = make_optimizer(settings.optimizer, schedule)
    mesh = training_mesh(num_params=num_params(config))
    dual = initial_dual(algorithm)
    key = jax.random.key(0)
    create = lambda: new_state(draw_params(trained(config, lora), key, "float32"), optimizer, dual)  # noqa: E731
    shardings = train_state_shardings(jax.eval_shape(create), config, mesh, lora)
    parts = StepSetup(
        row_logprobs=make_row_logprobs(
            config, compute, temperature=1.0, mesh=mesh, top_gradient=algorithm.centers
        ),
        compute_dtype=compute.dtype,
        settings=algorithm,
        max_completion_tokens=max_completion_tokens,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        policy=make_policy(lora),
    )
    step = jit_step(train_step, parts, shardings)
    state = [jax.jit(create, out_shardings=shardings)()]
    frozen = lora and jax.jit(lambda: init_params(config, key), out_shardings=replicated(mesh))()

    def call() -> jnp.ndarray:
        state[0], metrics, _ = step(state[0], batch() if callable(batch) else batch, frozen)
        return metrics["policy/loss"]

    return call

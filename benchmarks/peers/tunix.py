"""Tunix's side of the comparison; runs in Tunix's own environment."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig

from benchmarks.peers.rounds import Ended, Job, Rounds, work

_PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "optax", "qwix", "transformers", "numpy")


def train(job: Job, rounds: Rounds) -> None:
    """The actor's update on all rows; or the old log-probs in four parts, then four updates.

    As its learner lays them out: prompts padded on the left and completions on the right, to the
    limits. One update on rows with padding accumulates four parts, as all at once take more memory
    and no less time.

    The learner has no step of the second kind: its public pieces are called as it calls them.
    """
    cluster = _learner(job).rl_cluster
    rng = np.random.default_rng(0)
    vocabulary = json.loads((Path(job.checkpoint) / "config.json").read_text(encoding="utf-8"))[
        "vocab_size"
    ]
    longest = job.prompt_tokens, job.new_tokens
    real = [np.arange(longest[0]) >= longest[0] - np.repeat(job.prompt_lengths, job.group)[:, None]]
    real.append(np.arange(longest[1]) < np.asarray(job.lengths)[:, None])
    prompts, completions = (
        jnp.asarray(np.where(mask, rng.integers(2, vocabulary, mask.shape), 0)) for mask in real
    )
    prompt_mask, completion_mask = map(jnp.asarray, real)
    advantages = jnp.asarray(rng.normal(size=job.rows), jnp.float32)

    def example(rows: slice, old: jax.Array | None) -> TrainExample:
        return TrainExample(
            prompt_ids=prompts[rows],
            prompt_mask=prompt_mask[rows],
            completion_ids=completions[rows],
            completion_mask=completion_mask[rows],
            advantages=advantages[rows],
            ref_per_token_logps=None,
            old_per_token_logps=old,
        )

    size = job.rows // 4
    parts = [slice(start, start + size) for start in range(0, job.rows, size)]
    # Made once; only the old log-probs change from round to round.
    fixed = [example(rows, None) for rows in parts]
    everything = fixed if job.ragged else [example(slice(None), None)]

    def one() -> None:
        cluster.update_actor(everything, None)
        _finish(cluster)

    def four() -> None:
        old = cluster.get_old_per_token_logps(prompts, completions, micro_batch_size=size)
        pairs = zip(fixed, parts, strict=True)
        cluster.update_actor(
            [part.replace(old_per_token_logps=old[rows]) for part, rows in pairs], None
        )
        _finish(cluster)

    rounds.hello(_PACKAGES)
    rounds.repeat(four if job.part == "train4" else one)


def sampler(job: Job, rounds: Rounds) -> None:
    """The sampler's own call: texts in, texts and token ids out, no log-probs."""
    model, config = _model(job)
    generate = Sampler(
        model,
        _Tokenizer(job),
        CacheConfig(
            cache_size=job.prompt_tokens + job.new_tokens,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )
    texts = [text for text in job.texts()[: job.prompts] for _ in range(job.group)]
    rounds.hello(_PACKAGES)
    for seed in itertools.count():
        if not rounds.boundary():
            return
        sampled = generate(
            texts,
            max_generation_steps=job.new_tokens,
            max_prompt_length=job.prompt_tokens,
            temperature=1.0,
            top_p=1.0,
            seed=seed,
        )
        job.check_completions(sampled.tokens)


def reinforce(job: Job, rounds: Rounds) -> None:
    """GRPOLearner.train, from one global step's begin to the next."""
    learner = _learner(job)
    cluster = learner.rl_cluster
    step = learner._run_global_step
    sample = cluster.generate

    def stepped(*arguments: Any, **options: Any) -> None:
        _finish(cluster)
        if not rounds.boundary():
            raise Ended
        step(*arguments, **options)

    def checked(*arguments: Any, **options: Any) -> Any:
        sampled = sample(*arguments, **options)
        job.check_completions(sampled.tokens)
        return sampled

    learner._run_global_step = stepped
    cluster.generate = checked
    rounds.hello(_PACKAGES)
    try:
        learner.train(_batches(job))
    except Ended:
        return


def _batches(job: Job) -> Iterator[dict[str, np.ndarray]]:
    texts = itertools.cycle(job.texts())
    while True:
        yield {"prompts": np.array(list(itertools.islice(texts, job.prompts)))}


def _finish(cluster: RLCluster) -> None:
    jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))


class _Tokenizer:
    """The checkpoint's tokenizer. Its padding, id 0, is never sampled."""

    def __init__(self, job: Job) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return self._tokenizer.decode(ids)

    def bos_id(self) -> None:
        return None

    def eos_id(self) -> int:
        return self._tokenizer.eos_token_id

    def pad_id(self) -> int:
        return 0


def _model(job: Job) -> tuple[Qwen3, ModelConfig]:
    fields = json.loads((Path(job.checkpoint) / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        num_layers=fields["num_hidden_layers"],
        vocab_size=fields["vocab_size"],
        embed_dim=fields["hidden_size"],
        hidden_dim=fields["intermediate_size"],
        num_heads=fields["num_attention_heads"],
        head_dim=fields["head_dim"],
        num_kv_heads=fields["num_key_value_heads"],
        rope_theta=fields["rope_theta"],
        norm_eps=fields["rms_norm_eps"],
        use_tied_embedding=True,
    )
    model = create_model_from_safe_tensors(job.checkpoint, config, _mesh(), dtype=jnp.float32)
    job.check_parameters(sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))))
    return model, config


def _mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def _reward(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    return [float(ord(text[-1]) % 2) if text else 0.0 for text in completions]


def _learner(job: Job) -> GRPOLearner:
    """With its cluster, whose loss it sets."""
    mesh = _mesh()
    accumulated = {"mini_batch_size": job.prompts, "train_micro_batch_size": job.prompts // 4}
    cluster = RLCluster(
        actor=_model(job)[0],
        tokenizer=_Tokenizer(job),
        cluster_config=ClusterConfig(
            role_to_mesh={Role.ACTOR: mesh, Role.ROLLOUT: mesh},
            rollout_engine="vanilla",
            training_config=RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0)
                ),
                eval_every_n_steps=10**9,
                max_steps=10**6,
                rollout_micro_batch_size=job.prompts,
                compute_logps_micro_batch_size=job.prompts,
                **(accumulated if job.ragged and job.part != "train4" else {}),
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=job.new_tokens,
                max_prompt_length=job.prompt_tokens,
                kv_cache_size=job.prompt_tokens + job.new_tokens,
                temperature=1.0,
                top_p=1.0,
            ),
        ),
    )
    settings = GRPOConfig(num_generations=job.group, num_iterations=1, beta=0.0, epsilon=0.2)
    return GRPOLearner(rl_cluster=cluster, reward_fns=_reward, algo_config=settings)


if __name__ == "__main__":
    work({"train1": train, "train4": train, "rl": reinforce, "sampler": sampler})

"""Whole calls of an engine's `generate`, and rollouts by hand, as one array per completion."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.data.episode import Episode, in_prompt_order, single_turn
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.http import HttpSettings
from dcmdp_jax.engines.http.engine import RemoteEngine
from dcmdp_jax.engines.local import engine as local_module
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.models.config import ModelConfig


@dataclasses.dataclass
class Rollout:
    """N = prompts * G single-turn completions; completion `p * G + j` answers prompt p.

    Attributes:
        prompt_ids, completion_ids, rollout_logprobs: per completion.
        finish_reasons: per completion.
        group_ids: [N], index of the prompt.
        policy_version: of all tokens.
        pulled: the groups of each list that an engine yielded, in the order of finishing.
        routed_experts: per completion, of all its tokens but the last; None if no one asked.
    """

    prompt_ids: list[np.ndarray]
    completion_ids: list[np.ndarray]
    rollout_logprobs: list[np.ndarray]
    finish_reasons: list[str]
    group_ids: np.ndarray
    policy_version: int
    pulled: list[list[int]] = dataclasses.field(default_factory=list)
    routed_experts: list[np.ndarray] | None = None

    @property
    def episodes(self) -> list[Episode]:
        groups = self.group_ids.tolist()
        routed = self.routed_experts or [None] * len(groups)
        columns = self.prompt_ids, self.completion_ids, self.rollout_logprobs
        names = ("finish_reason", "routed_experts")
        ends = [
            dict(zip(names, end, strict=True))
            for end in zip(self.finish_reasons, routed, strict=True)
        ]
        return [
            single_turn(
                *text,
                **end,
                group=group,
                member=groups[:row].count(group),
                policy_version=self.policy_version,
            )
            for row, (group, end, *text) in enumerate(zip(groups, ends, *columns, strict=True))
        ]


def sample(
    engine: Engine,
    prompts: Sequence[np.ndarray],
    sampling: SamplingParams,
    *,
    seed: int,
    step: int,
    on_pull: Callable[[list[Episode]], None] = lambda complete: None,
) -> Rollout:
    """Pull all groups. Each must come complete and once.

    Args:
        engine, prompts, sampling, seed, step: of `generate`.
        on_pull: called with each list, before the next one is asked for.
    """
    episodes = []
    pulled = []
    for complete in engine.generate(prompts, sampling, seed=seed, step=step):
        on_pull(complete)
        groups = [episode.group for episode in complete[:: sampling.group_size]]
        assert [(e.group, e.member) for e in complete] == [
            (g, j) for g in groups for j in range(sampling.group_size)
        ]
        episodes += complete
        pulled.append(groups)
    assert sorted(group for groups in pulled for group in groups) == list(range(len(prompts)))
    episodes = in_prompt_order(episodes)
    (version,) = {
        int(v) for episode in episodes for v in episode.policy_versions[episode.sampled_mask]
    }
    return Rollout(
        [episode.prompt_ids for episode in episodes],
        [episode.completion_ids for episode in episodes],
        [episode.rollout_logprobs[episode.sampled_mask] for episode in episodes],
        [episode.finish_reason for episode in episodes],
        np.array([episode.group for episode in episodes]),
        version,
        pulled,
        [e.columns["routed_experts"][:-1] for e in episodes]
        if "routed_experts" in episodes[0].columns
        else None,
    )


def assert_same_samples(first: Rollout, second: Rollout, *, atol: float = 0.0) -> None:
    """Assert the same tokens and ends, and log-probs that differ by at most `atol` nats."""
    assert first.finish_reasons == second.finish_reasons
    for a, b in zip(first.completion_ids, second.completion_ids, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(first.rollout_logprobs, second.rollout_logprobs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def counted_rollout(lengths, group_size, finish=None):
    """Completion i has prompt 100 + group and tokens i * 1000 + t, log-prob -(t + 1) / 8."""
    prompts = [np.arange(p, dtype=np.int32) + 100 for p, _ in lengths]
    completions = [
        np.arange(c, dtype=np.int32) + 1000 * (i + 1) for i, (_, c) in enumerate(lengths)
    ]
    logprobs = [-(np.arange(c, dtype=np.float32) + 1) / 8 for _, c in lengths]
    groups = np.arange(len(lengths), dtype=np.int32) // group_size
    return Rollout(prompts, completions, logprobs, finish or ["stop"] * len(lengths), groups, 7)


def local_engine(
    config: ModelConfig, *, mesh: Mesh | None = None, cache_block: int | None = None, **given: Any
) -> LocalEngine:
    """The embedded engine of a model, with any of `EngineArguments`; batches shrink to 32 rows.

    `cache_block` takes the place of `default_cache_block`.
    """
    arguments = EngineArguments(**{"model": config, "min_rows": 32, **given})
    if cache_block is None:
        return LocalEngine(arguments, mesh=mesh)
    with mock.patch.object(local_module, "default_cache_block", lambda platform: cache_block):
        return LocalEngine(arguments, mesh=mesh)


def remote_engine(config: ModelConfig, *, server, timeout_s=600.0, retries=None, **given):
    """The engine of a server over HTTP, with any of `EngineArguments`; `retries` is that of
    `RemoteEngine`.
    """
    arguments = EngineArguments(model=config, settings=HttpSettings(server, timeout_s), **given)
    return RemoteEngine(arguments, **({} if retries is None else {"retries": retries}))

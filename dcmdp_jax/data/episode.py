"""Episodes: what an engine sampled after one prompt, token by token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """A prompt and everything after it.

    The policy sampled the tokens of `sampled_mask`. The others are given: the prompt, or the output of a tool. The
    arrays have one entry per token, [T] each.

    Attributes:
        token_ids: int32, the end-of-sequence token included when it was sampled.
        sampled_mask: bool; the first token is never sampled.
        rollout_logprobs: float32 nats, under the distribution sampled from; undefined where not sampled.
        policy_versions: int32, the training step whose weights sampled the token; -1 where not sampled.
        group: index of the prompt in the call of `generate`.
        member: 0 .. group_size - 1, which completion of its group.
        finish_reason: "stop" (sampled an end token) or "length".
        routed_experts: None, or [T, layers, k] int16, the experts of each layer that the engine sent each token to when
            it read it; -1 for a token that it did not read, such as the last.
    """

    token_ids: np.ndarray
    sampled_mask: np.ndarray
    rollout_logprobs: np.ndarray
    policy_versions: np.ndarray
    group: int
    member: int
    finish_reason: str
    routed_experts: np.ndarray | None = None

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(np.argmax(self.sampled_mask))

    @property
    def prompt_ids(self) -> np.ndarray:
        """[P] int32, the tokens before the first sampled one."""
        return self.token_ids[: self.prompt_length]

    @property
    def completion_ids(self) -> np.ndarray:
        """[T - P] int32, everything after the prompt, given tokens included."""
        return self.token_ids[self.prompt_length :]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, |o_i|."""
        return int(np.count_nonzero(self.sampled_mask))


def single_turn(
    prompt_ids: np.ndarray,
    completion_ids: np.ndarray,
    logprobs: np.ndarray,
    *,
    policy_version: int,
    group: int,
    member: int,
    finish_reason: str,
    routed_experts: np.ndarray | None = None,
) -> Episode:
    """Make the episode of one completion: all tokens after the prompt are sampled, by one version of the policy.

    Args:
        prompt_ids: [P] int32, at least one token.
        completion_ids: [C] int32, at least one token.
        logprobs: [C] float32 nats.
        policy_version, group, member, finish_reason: see `Episode`.
        routed_experts: None, or [P + C - 1, layers, k] integers, of all tokens but the last.
    """
    given = len(prompt_ids)
    token_ids = np.concatenate([prompt_ids, completion_ids], dtype=np.int32)
    sampled_mask = np.arange(token_ids.size) >= given
    rollout_logprobs = np.zeros(token_ids.size, np.float32)
    rollout_logprobs[given:] = logprobs
    policy_versions = np.where(sampled_mask, policy_version, -1).astype(np.int32)
    if routed_experts is not None:
        unread = token_ids.size - len(routed_experts)
        routed_experts = np.pad(routed_experts.astype(np.int16), ((0, unread), (0, 0), (0, 0)), constant_values=-1)
    return Episode(
        token_ids, sampled_mask, rollout_logprobs, policy_versions, group, member, finish_reason, routed_experts
    )


class OpenGroups:
    """Episodes of one call of `generate`, held until their group is complete.

    Args:
        group_size: episodes of a group.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._waiting: dict[int, list[Episode]] = {}

    def add(self, episodes: Iterable[Episode]) -> list[Episode]:
        """Add finished episodes; return those of the groups that they complete, in prompt order, maybe none."""
        complete: list[Episode] = []
        for episode in episodes:
            group = self._waiting.setdefault(episode.group, [])
            group.append(episode)
            if len(group) == self._group_size:
                complete += self._waiting.pop(episode.group)
        return in_prompt_order(complete)


def collect(groups: Iterable[Iterable[Episode]]) -> list[Episode]:
    """All episodes of a call of `generate`, in prompt order."""
    return in_prompt_order(itertools.chain.from_iterable(groups))


def in_prompt_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Sort episodes by prompt, then member: in what order they finished must not change what is learned."""
    return sorted(episodes, key=lambda episode: (episode.group, episode.member))

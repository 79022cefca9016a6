"""Episodes: what an engine sampled after one prompt, token by token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from dcmdp_jax.data.columns import over_sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """A prompt and everything after it.

    The policy sampled the tokens of `sampled_mask`. The others are given: the prompt, or the output of a tool.

    Attributes:
        token_ids: [T] int32, the end-of-sequence token included when it was sampled.
        sampled_mask: [T] bool; the first token is never sampled.
        group: index of the prompt in the call of `generate`.
        member: 0 .. group_size - 1, which completion of its group.
        finish_reason: "stop" (sampled an end token) or "length".
        columns: name -> [T, ...], the further arrays with an entry for each token, as declared in `columns.COLUMNS`.
            Entries of tokens that a column says nothing about are undefined.
    """

    token_ids: np.ndarray
    sampled_mask: np.ndarray
    group: int
    member: int
    finish_reason: str
    columns: Mapping[str, np.ndarray]

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[T] float32 nats, under the distribution sampled from; undefined where not sampled."""
        return self.columns["rollout_logprobs"]

    @property
    def policy_versions(self) -> np.ndarray:
        """[T] int32, the training step whose weights sampled the token; undefined where not sampled."""
        return self.columns["policy_versions"]

    def with_columns(self, **columns: np.ndarray) -> Episode:
        """The episode with columns added or replaced, [T, ...] each."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

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
    **columns: np.ndarray | None,
) -> Episode:
    """Make the episode of one completion: all tokens after the prompt are sampled, by one version of the policy.

    Args:
        prompt_ids: [P] int32, at least one token.
        completion_ids: [C] int32, at least one token.
        logprobs: [C] float32 nats.
        policy_version, group, member, finish_reason: see `Episode`.
        columns: further columns by their names in `columns.COLUMNS`; of a column that given tokens have [P + C, ...] or
            fewer, without the last tokens; else [C, ...]. None: the engine has none.
    """
    token_ids = np.concatenate([prompt_ids, completion_ids], dtype=np.int32)
    sampled_mask = np.arange(token_ids.size) >= len(prompt_ids)
    versions = np.full(len(completion_ids), policy_version, np.int32)
    found = {"rollout_logprobs": logprobs, "policy_versions": versions, **columns}
    whole = {name: over_sequence(name, values, sampled_mask) for name, values in found.items() if values is not None}
    return Episode(token_ids, sampled_mask, group, member, finish_reason, whole)


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

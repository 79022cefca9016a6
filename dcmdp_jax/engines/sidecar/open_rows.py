"""Completions of one call of `generate`: what is still to be asked for, and what was sampled of each so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from dcmdp_jax.data.episode import Episode, OpenGroups, single_turn
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.sidecar.process import SidecarBroken
from dcmdp_jax.engines.sidecar.replies import Completion
from dcmdp_jax.engines.sidecar.seeds import request_seeds


@dataclasses.dataclass
class _Row:
    """What was sampled of a completion, in pieces of one version each."""

    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)

    @property
    def taken(self) -> int:
        return sum(piece.size for piece in self.tokens)


class OpenRows:
    """The rows `prompt * group_size + member` of a call that have not ended.

    A completion that was cut is asked for again with the tokens that it has as part of the prompt, and draws of its
    own: those of (seed, step, row, tokens so far).

    Args:
        prompts: by group, checked token ids.
        sampling: the distribution.
        seed, step, first_prompt: as of `Engine.generate`.

    Raises:
        ValueError: for a seed or step out of range.
    """

    def __init__(
        self, prompts: Mapping[int, np.ndarray], sampling: SamplingParams, *, seed: int, step: int, first_prompt: int
    ) -> None:
        self._prompts, self._groups, self._size = dict(prompts), list(prompts), sampling.group_size
        self._limit, self._numbers, self._first = sampling.max_completion_tokens, (seed, step), first_prompt
        self.begin_again()
        self._delivered: set[int] = set()
        request_seeds(seed, step, self._row_numbers(self.rows))

    def begin_again(self) -> None:
        """Forget what was sampled, but not which groups were delivered: they are not given again."""
        self._open = {row: _Row() for row in range(len(self._groups) * self._size)}
        self._waiting = OpenGroups(self._size)

    @property
    def rows(self) -> list[int]:
        """Those that have not ended."""
        return list(self._open)

    def _row_numbers(self, rows: Iterable[int]) -> list[int]:
        return [(self._first + self._groups[row // self._size]) * self._size + row % self._size for row in rows]

    def lengths(self, rows: Iterable[int]) -> list[int]:
        """Tokens of what each is to be sampled after."""
        return [self._prompts[self._groups[row // self._size]].size + self._open[row].taken for row in rows]

    def request(self, *, cut: bool) -> dict[str, np.ndarray]:
        """Arrays of a request for all of `rows`, in their order.

        Args:
            cut: whether the request can be interrupted: each row has its own limit then.
        """
        rows, shared = self.rows, {}
        prompts: list[np.ndarray] = []
        prompt_of_row = []
        for row in rows:
            group, taken = self._groups[row // self._size], self._open[row].tokens
            if taken or group not in shared:
                if not taken:
                    shared[group] = len(prompts)
                prompts.append(np.concatenate([self._prompts[group], *taken]))
            prompt_of_row.append(len(prompts) - 1 if taken else shared[group])
        taken = [self._open[row].taken for row in rows]
        arrays = {
            "prompt_ids": np.concatenate(prompts),
            "prompt_lengths": np.array([prompt.size for prompt in prompts], np.int32),
            "prompt_of_row": np.array(prompt_of_row, np.int32),
            "seeds": request_seeds(*self._numbers, self._row_numbers(rows), taken),
        }
        return arrays | ({"limits": np.array([self._limit - each for each in taken], np.int32)} if cut else {})

    def add(
        self, asked: list[int], completions: list[Completion], columns: list[dict[str, np.ndarray]], version: int
    ) -> list[Episode]:
        """Add what came for a request; return the episodes of the groups that are complete and were not delivered.

        Args:
            asked: the rows of the request.
            completions: whose `row` counts in `asked`.
            columns: further columns of each, of completions in one piece.
            version: of the weights.

        Raises:
            SidecarBroken: if a completion has ended already.
        """
        ended = []
        for completion, further in zip(completions, columns, strict=True):
            row = asked[completion.row]
            if row not in self._open:
                raise SidecarBroken(f"generate: completion {row} arrived twice")
            mine = self._open[row]
            mine.tokens.append(completion.token_ids)
            mine.logprobs.append(completion.logprobs)
            mine.versions.append(np.full(completion.token_ids.size, version, np.int32))
            if completion.finish_reason != "cut":
                ended.append(self._episode(row, completion.finish_reason, further))
        fresh = [episode for episode in self._waiting.add(ended) if episode.group not in self._delivered]
        self._delivered.update(episode.group for episode in fresh)
        return fresh

    def _episode(self, row: int, finish_reason: str, columns: dict[str, np.ndarray]) -> Episode:
        mine, group = self._open.pop(row), self._groups[row // self._size]
        return single_turn(
            self._prompts[group], np.concatenate(mine.tokens), np.concatenate(mine.logprobs),
            policy_version=int(mine.versions[-1][0]), group=group, member=row % self._size,
            finish_reason=finish_reason, **{"policy_versions": np.concatenate(mine.versions)} | columns,
        )  # fmt: skip

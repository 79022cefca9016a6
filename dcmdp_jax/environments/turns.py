"""Completions in turns: the policy samples, the environment answers, and so on until one of them ends.

An answer becomes a message of the chat. Its tokens are given, not sampled: they are outside `Episode.sampled_mask`, so
neither loss nor discrepancy has them. Tokens that were sampled stay as they were; nothing is tokenized again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.data.prompts import chat_messages, render_chat
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.protocol import Message, Problem, RewardError
from dcmdp_jax.rewards.scoring import Played, columns_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
# The turns of a completion must not repeat each other's draws.
_TURN_SEED_OFFSET = 11_000_027
_MARK = "@the turn of the policy@"


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    """Where completions end at the latest.

    Attributes:
        turns: most turns of the policy.
        turn_tokens: most tokens that it samples in one turn.
        prompt_tokens: most tokens of a prompt with the first observation.
    """

    turns: int
    turn_tokens: int
    prompt_tokens: int


@dataclasses.dataclass
class _Play:
    """A completion that is played."""

    prompt: np.ndarray
    messages: list[Message] = dataclasses.field(default_factory=list)
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    sampled: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)
    used: int = 0
    turns: int = 0
    reward: float | None = 0.0
    done: bool = False
    finish_reason: str = "stop"

    def add(self, ids: np.ndarray, logprobs: np.ndarray | None = None, versions: np.ndarray | None = None) -> None:
        """Append tokens, sampled if they have log-probs."""
        given = logprobs is None
        self.tokens.append(np.asarray(ids, np.int32))
        self.sampled.append(np.full(len(ids), not given))
        self.logprobs.append(np.zeros(len(ids), np.float32) if given else logprobs)
        self.versions.append(np.full(len(ids), -1, np.int32) if given else versions)
        self.used += len(ids)

    def context(self) -> np.ndarray:
        """All tokens so far."""
        return np.concatenate([self.prompt, *self.tokens])

    def episode(self, group: int, member: int) -> Episode:
        """The whole completion."""
        given = len(self.prompt)
        return Episode(
            token_ids=self.context(),
            sampled_mask=np.concatenate([np.zeros(given, bool), *self.sampled]),
            group=group,
            member=member,
            finish_reason=self.finish_reason,
            columns={
                "rollout_logprobs": np.concatenate([np.zeros(given, np.float32), *self.logprobs]).astype(np.float32),
                "policy_versions": np.concatenate([np.full(given, -1, np.int32), *self.versions]),
            },
        )


def answer_text(tokenizer: PreTrainedTokenizerBase, observation: str, role: str, variables: Mapping[str, Any]) -> str:
    """What the template writes between the end token of one turn of the policy and the begin of the next.

    Raises:
        RewardError: in one line, if it can't, or leaves one of the two out.
    """
    chat = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": _MARK},
        {"role": role, "content": observation},
    ]
    try:
        text = render_chat(tokenizer, chat, **variables)
    except Exception as error:  # templates raise what they like
        raise RewardError(f"the chat template can't render the role {role!r}: {one_line(error)}") from error
    _, mark, after = text.partition(_MARK)
    if not mark or observation.strip() not in after:
        raise RewardError(
            f"the chat template leaves out a turn of the policy, or the observation after it (role {role!r}); it must "
            "write both for task.environment"
        )
    return after.removeprefix(tokenizer.eos_token)


class TurnSampler:
    """Samples completions in turns. After `generate` was iterated, `played` has what the environment gave.

    Args:
        engine: with the weights of the step.
        pool: the environments.
        tokenizer: of the policy.
        columns: names of the columns that environments get.
        limits: of a completion.
        prompt_suffix: of the user's last message.
        variables: of the chat template.
        stop_on_error: whether a failure of the environment raises. Otherwise completions that were being played end
            without a reward.
    """

    def __init__(
        self,
        engine: Engine,
        pool: EnvironmentPool,
        tokenizer: PreTrainedTokenizerBase,
        columns: Sequence[str],
        limits: TurnLimits,
        *,
        prompt_suffix: str,
        variables: Mapping[str, Any],
        stop_on_error: bool,
    ) -> None:
        self._engine, self._pool, self._tokenizer, self._columns = engine, pool, tokenizer, tuple(columns)
        self._limits, self._suffix, self._variables = limits, prompt_suffix, variables
        self._stop_on_error, self._warned = stop_on_error, set[str]()
        self.played: dict[int, Played] = {}

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        problems: Sequence[Problem],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
        check_stop: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Episode]]:
        """Sample `group_size` completions for each prompt; all come together, after the last turn.

        The first turn draws as `Engine.generate` would. A later one numbers its rows by the completions that are still
        played, so a run on another number of hosts draws others there.

        Args:
            prompts: token ids of each problem.
            problems: the problem of each prompt.
            sampling: G, temperature, stop tokens; `max_completion_tokens` bounds all turns and answers together.
            seed, step, first_prompt: as of `Engine.generate`.
            check_stop: called while waiting; what it raises ends the sampling.

        Raises:
            RewardError: in one line, if the environment fails and the sampler stops then.
            UserError: if a first observation makes a prompt too long or differs within a group.
        """
        size, limit = sampling.group_size, sampling.max_completion_tokens
        self.played = {}
        every = [problem for problem in problems for _ in range(size)]
        plays = [_Play(prompt) for prompt in prompts for _ in range(size)]
        live = list(range(len(plays)))
        role = self._begin(plays, every, size, live, check_stop)
        turn_tokens = min(self._limits.turn_tokens, limit)
        for turn in range(self._limits.turns):
            if not live:
                break
            together = turn == 0 and len(live) == len(plays)
            asked = dataclasses.replace(
                sampling, max_completion_tokens=turn_tokens, group_size=size if together else 1
            )  # fmt: skip
            contexts = [plays[row].context() for row in (live[::size] if together else live)]
            sampled = self._engine.generate(
                contexts, asked, seed=seed + turn * _TURN_SEED_OFFSET, step=step,
                first_prompt=first_prompt if together else first_prompt * size,
            )  # fmt: skip
            episodes = []
            with contextlib.closing(sampled) as groups:
                for group in groups:
                    check_stop()
                    episodes.append(group)
                    yield []
            spoken: list[int] = []
            for row, episode in zip(live, collect(episodes), strict=True):
                start, play = episode.prompt_length, plays[row]
                play.add(episode.completion_ids, episode.rollout_logprobs[start:], episode.policy_versions[start:])
                play.turns, play.finish_reason = turn + 1, episode.finish_reason
                if episode.finish_reason == "stop":
                    spoken.append(row)
                else:
                    play.messages.append({"role": "assistant", "content": self._text(episode.completion_ids)})
            live = self._answer(plays, spoken, role, turn, limit - turn_tokens, check_stop)
        self._finish(plays)
        yield [play.episode(row // size, row % size) for row, play in enumerate(plays)]

    def _begin(
        self, plays: list[_Play], problems: Sequence[Problem], size: int, live: list[int],
        check_stop: Callable[[], None],
    ) -> str | None:  # fmt: skip
        """Reset the environments, and add what they say first to the prompts.

        Returns:
            The role of what they say later; None if they failed.
        """
        try:
            observations, role = self._pool.reset(
                [problem.given for problem in problems], columns_of(problems, self._columns), check_stop
            )
        except RewardError as failure:
            self._failed(failure, plays, live)
            return None
        for row, text in enumerate(observations):
            if text != observations[row - row % size]:
                raise RewardError(
                    f"environment {self._pool.name}: reset says other things to the completions of one prompt (row "
                    f"{problems[row].index} of {problems[row].source}); it must depend on its arguments alone"
                )
            if text:
                plays[row].prompt = self._with_observation(problems[row], text)
        return role

    def _with_observation(self, problem: Problem, text: str) -> np.ndarray:
        asked = dataclasses.replace(problem, prompt=f"{problem.prompt}\n\n{text}")
        rendered = render_chat(
            self._tokenizer, chat_messages(asked, self._suffix), problem.tools, **self._variables
        )  # fmt: skip
        ids = self._ids(rendered)
        if len(ids) > self._limits.prompt_tokens:
            raise RewardError(
                f"environment {self._pool.name}: the prompt of row {problem.index} of {problem.source} has {len(ids)} "
                f"tokens with the first observation, task.max_prompt_tokens is {self._limits.prompt_tokens}"
            )
        return ids

    def _answer(
        self, plays: list[_Play], spoken: list[int], role: str | None, turn: int, room: int,
        check_stop: Callable[[], None],
    ) -> list[int]:  # fmt: skip
        """Let the environment answer those who ended their turn; the rows that have another one.

        Args:
            plays: all completions.
            spoken: rows that wait for an answer.
            role: of the answers, None if there are none any more.
            turn: number of this turn.
            room: most tokens that a completion may have where another turn begins.
            check_stop: called while waiting.
        """
        texts = [self._text(plays[row].tokens[-1]) for row in spoken]
        for row, text in zip(spoken, texts, strict=True):
            plays[row].messages.append({"role": "assistant", "content": text})
        if role is None:
            return []
        try:
            steps = self._pool.step(spoken, texts, check_stop) if spoken else []
        except RewardError as failure:
            self._failed(failure, plays, spoken)
            return []
        going_on = []
        for row, answered in zip(spoken, steps, strict=True):
            play = plays[row]
            play.reward, play.done = play.reward + answered.reward, answered.done
            if answered.done or turn + 1 == self._limits.turns:
                continue
            ids = self._ids(answer_text(self._tokenizer, answered.observation, role, self._variables))
            if play.used + len(ids) > room:
                play.finish_reason = "length"
                continue
            play.add(ids)
            play.messages.append({"role": role, "content": answered.observation})
            going_on.append(row)
        return going_on

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _text(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _failed(self, failure: RewardError, plays: list[_Play], rows: list[int]) -> None:
        """Stop, or end the completions that were played, without a reward."""
        if self._stop_on_error:
            where = "" if failure.row is None else f" (completion {failure.row} of the batch)"
            raise RewardError(f"{failure}{where}") from failure
        for row in rows:
            plays[row].reward = None
        if "failed" not in self._warned:
            self._warned.add("failed")
            _LOG.warning("%s; the completions that were played get no reward. Later failures are only counted", failure)

    def _finish(self, plays: list[_Play]) -> None:
        endless = sum(not play.done and play.turns == self._limits.turns for play in plays)
        if endless and "endless" not in self._warned:
            self._warned.add("endless")
            _LOG.warning(
                "environment %s: %d of %d completions ended by task.max_turns = %d; environment/done_fraction has the "
                "share that it ended",
                *(self._pool.name, endless, len(plays), self._limits.turns),
            )
        self.played = {
            row: Played(
                reward=play.reward,
                messages=play.messages,
                text=self._text(np.concatenate(play.tokens)) if play.tokens else "",
                ids=np.concatenate(play.tokens) if play.tokens else np.zeros(0, np.int32),
                turns=play.turns,
                done=play.done,
            )
            for row, play in enumerate(plays)
        }

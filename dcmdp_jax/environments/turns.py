"""Completions in turns: the policy samples, the environment answers, and so on until one of them ends.

An answer becomes a message of the chat. Its tokens are given, not sampled: they are outside `Episode.sampled_mask`, so
neither loss nor discrepancy has them. Tokens that were sampled stay as they were; nothing is tokenized again.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.data.chat import chat_messages, is_written, render_chat
from dcmdp_jax.data.episode import Episode, collect
from dcmdp_jax.data.tokenizer import encode_texts
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.protocol import Message, Problem, RewardError
from dcmdp_jax.rewards.scoring import Played, columns_of

_LOG = logging.getLogger(__name__)
# The turns of a completion must not repeat each other's draws.
_TURN_SEED_OFFSET = 11_000_027
_MARK = "@the turn of the policy@"


@dataclasses.dataclass
class _Play:
    """A completion that is played.

    Attributes:
        prompt: token ids, the first observation included.
        tools: JSON schemas of its tools.
        parts: token ids, whether they are sampled, log-probs and policy versions of each stretch after the prompt.
    """

    prompt: np.ndarray
    tools: Sequence[Mapping[str, Any]]
    parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    turns: int = 0
    reward: float | None = 0.0
    done: bool = False
    finish_reason: str = "stop"

    def arrays(self) -> list[np.ndarray]:
        """The arrays of `parts`, joined behind the prompt."""
        return [np.concatenate(each) for each in zip(_given(self.prompt), *self.parts, strict=True)]

    @property
    def completion_ids(self) -> np.ndarray:
        """Token ids after the prompt."""
        return self.arrays()[0][len(self.prompt) :]

    def episode(self, group: int, member: int) -> Episode:
        """The whole completion."""
        ids, sampled, logprobs, versions = self.arrays()
        columns = {"rollout_logprobs": logprobs.astype(np.float32), "policy_versions": versions}
        return Episode(ids, sampled, group, member, self.finish_reason, columns)


def _given(ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """A stretch of tokens that were not sampled."""
    count = len(ids)
    return np.asarray(ids, np.int32), np.zeros(count, bool), np.zeros(count, np.float32), np.full(count, -1, np.int32)


def answer_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:  # fmt: skip
    """The template's text between the end token of one turn of the policy and the begin of the next.

    Raises:
        RewardError: in one line, if it can't, or leaves one of the two out.
    """
    role, chat = messages[0]["role"], [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]
    try:
        text = render_chat(tokenizer, [*chat, *messages], tools, **variables)
    except Exception as error:  # templates raise what they like
        raise RewardError(f"the chat template can't render the role {role!r}: {one_line(error)}") from error
    _, mark, after = text.partition(_MARK)
    if not mark or not all(is_written(message["content"].strip(), after) for message in messages):
        raise RewardError(
            f"the chat template leaves out a turn of the policy, or the observation after it (role {role!r}); it must "
            "write both for task.environment"
        )
    return after.removeprefix(tokenizer.eos_token)


@dataclasses.dataclass
class TurnSampler:
    """Samples completions in turns. After `generate` was iterated, `played` has what the environment gave.

    Attributes:
        engine: has the weights of the step.
        pool: the environments.
        tokenizer: the policy's.
        columns: names of the columns that environments get.
        turns: most turns of the policy in a completion.
        turn_tokens: most tokens that it samples in one turn.
        prompt_tokens: most tokens of a prompt with the first observation.
        prompt_suffix: end of the user's last message.
        variables: variables of the chat template.
        stop_on_error: whether a failure of the environment raises. Otherwise completions that were being played end
            without a reward.
    """

    engine: Engine
    pool: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    columns: Sequence[str]
    turns: int
    turn_tokens: int
    prompt_tokens: int
    prompt_suffix: str
    variables: Mapping[str, Any]
    stop_on_error: bool
    played: dict[int, Played] = dataclasses.field(default_factory=dict)
    _warned: set[str] = dataclasses.field(default_factory=set)

    def generate(
        self, prompts: Sequence[np.ndarray], problems: Sequence[Problem], sampling: SamplingParams, *, seed: int,
        step: int, first_prompt: int = 0, check_stop: Callable[[], None] = lambda: None,
    ) -> Iterator[list[Episode]]:  # fmt: skip
        """Sample `group_size` completions for each prompt; all come together, after the last turn.

        The first turn draws as `Engine.generate` would. A later one numbers its rows by the completions that are still
        played, so a run on another number of hosts draws others there.

        Args:
            prompts: token ids of each problem.
            problems: the problem of each prompt.
            sampling: G, temperature, stop tokens; `max_completion_tokens` bounds all turns and answers together.
            seed, step, first_prompt: see `Engine.generate`.
            check_stop: called while waiting; what it raises ends the sampling.

        Raises:
            RewardError: in one line, if the environment fails and the sampler stops then.
            UserError: if a first observation makes a prompt too long or differs within a group.
        """
        self.played, size, limit = {}, sampling.group_size, sampling.max_completion_tokens
        every = [problem for problem in problems for _ in range(size)]
        plays = [_Play(prompts[row // size], problem.tools) for row, problem in enumerate(every)]
        live, turn_tokens = list(range(len(plays))), min(self.turn_tokens, limit)
        role = self._begin(plays, every, size, check_stop)
        for turn in range(self.turns):
            if not live:
                break
            together = size if turn == 0 else 1
            given = [plays[row].arrays()[0] for row in live[::together]]
            drawn = dataclasses.replace(sampling, max_completion_tokens=turn_tokens, group_size=together)
            place = {"seed": seed + turn * _TURN_SEED_OFFSET, "first_prompt": first_prompt * size // together}
            sampled = self.engine.generate(given, drawn, step=step, **place)
            episodes = []
            with contextlib.closing(sampled) as groups:
                for group in groups:
                    check_stop()
                    episodes.append(group)
                    yield []
            for row, episode in zip(live, collect(episodes), strict=True):
                start, play, ids = episode.prompt_length, plays[row], episode.completion_ids
                logprobs, versions = episode.rollout_logprobs[start:], episode.policy_versions[start:]
                play.parts.append((ids, np.ones(len(ids), bool), logprobs, versions))
                play.messages.append({"role": "assistant", "content": self._text(ids)})
                play.turns, play.finish_reason = turn + 1, episode.finish_reason
            spoken = [row for row in live if plays[row].finish_reason == "stop"]
            live = self._answer(plays, spoken, role, turn, limit - turn_tokens, check_stop)
        self._finish(plays)
        yield [play.episode(row // size, row % size) for row, play in enumerate(plays)]

    def _begin(
        self, plays: list[_Play], problems: Sequence[Problem], size: int, check_stop: Callable[[], None]
    ) -> str | None:
        """Reset the environments, and add what they say first to the prompts.

        Returns:
            The role of what they say later; None if they failed.
        """
        given = [problem.given for problem in problems]
        try:
            observations, role = self.pool.reset(given, columns_of(problems, self.columns), check_stop)
        except RewardError as failure:
            self._failed(failure, plays)
            return None
        for row, (play, problem, text) in enumerate(zip(plays, problems, observations, strict=True)):
            where = f"row {problem.index} of {problem.source}"
            if text != observations[row - row % size]:
                raise RewardError(
                    f"environment {self.pool.name}: reset says other things to the completions of one prompt "
                    f"({where}); it must depend on its arguments alone"
                )
            if not text:
                continue
            asked = dataclasses.replace(problem, prompt=f"{problem.prompt}\n\n{text}")
            chat = chat_messages(asked, self.prompt_suffix)
            play.prompt = self._ids(render_chat(self.tokenizer, chat, problem.tools, **self.variables))
            if len(play.prompt) > self.prompt_tokens:
                raise RewardError(
                    f"environment {self.pool.name}: the prompt of {where} has {len(play.prompt)} tokens with the "
                    f"first observation, task.max_prompt_tokens is {self.prompt_tokens}"
                )
        return role

    def _answer(
        self, plays: list[_Play], spoken: list[int], role: str | None, turn: int, room: int,
        check_stop: Callable[[], None],
    ) -> list[int]:  # fmt: skip
        """Let the environment answer those who ended their turn; the rows that have another one.

        Args:
            plays: all completions.
            spoken: rows that wait for an answer.
            role: role of the answers, None if there are none any more.
            turn: number of this turn.
            room: most tokens that a completion may have where another turn begins.
            check_stop: called while waiting.
        """
        if role is None or not spoken:
            return []
        try:
            steps = self.pool.step(spoken, [plays[row].messages[-1]["content"] for row in spoken], check_stop)
        except RewardError as failure:
            self._failed(failure, [plays[row] for row in spoken])
            return []
        going_on = []
        for row, answered in zip(spoken, steps, strict=True):
            play = plays[row]
            play.reward, play.done = play.reward + answered.reward, answered.done
            if answered.done or turn + 1 == self.turns:
                continue
            messages = [{"role": role, **each} for each in answered.observations]
            ids = self._ids(answer_text(self.tokenizer, messages, self.variables, play.tools))
            if len(play.completion_ids) + len(ids) > room:
                play.finish_reason = "length"
                continue
            play.parts.append(_given(ids))
            play.messages += messages
            going_on.append(row)
        return going_on

    def _ids(self, text: str) -> np.ndarray:
        return np.asarray(encode_texts(self.tokenizer, [text], "an environment's answer")[0], np.int32)

    def _text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _failed(self, failure: RewardError, plays: list[_Play]) -> None:
        """Stop, or end the completions that were played, without a reward."""
        if self.stop_on_error:
            where = "" if failure.row is None else f" (completion {failure.row} of the batch)"
            raise RewardError(f"{failure}{where}") from failure
        for play in plays:
            play.reward = None
        if "failed" not in self._warned:
            self._warned.add("failed")
            _LOG.warning("%s; the completions that were played get no reward. Later failures are only counted", failure)

    def _finish(self, plays: list[_Play]) -> None:
        endless = sum(not play.done and play.turns == self.turns for play in plays)
        if endless and "endless" not in self._warned:
            self._warned.add("endless")
            said = "environment %s: %d of %d completions ended by task.max_turns = %d, see environment/done_fraction"
            _LOG.warning(said, self.pool.name, endless, len(plays), self.turns)
        for row, play in enumerate(plays):
            ids = play.completion_ids
            self.played[row] = Played(play.reward, play.messages, self._text(ids), ids, play.turns, play.done)

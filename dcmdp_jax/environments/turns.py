"""Completions in turns: the policy samples, the environment answers, until one of them ends.

An answer becomes a message of the chat. Its tokens are given, not sampled: they are outside
`Episode.sampled_mask`, so neither loss nor discrepancy has them. Tokens that were sampled stay as
they were; nothing is tokenized again.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.data.chat import chat_messages, is_written, render_chat
from dcmdp_jax.data.episode import Episode, collect, over_sequence
from dcmdp_jax.data.tokenizer import control_tokens, encode_texts, token_text
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.errors import one_line
from dcmdp_jax.rewards.protocol import Message, Problem, RewardError
from dcmdp_jax.rewards.scoring import Played, columns_of

_LOG = logging.getLogger(__name__)
_TURN_SEED_OFFSET = 11_000_027
"""Added to the seed for each turn: the turns of a completion must not repeat each other's draws."""
_MARK = "@the turn of the policy@"


@dataclasses.dataclass
class _Play:
    """A completion that is played.

    Attributes:
        prompt: token ids, the first observation included.
        problem: the problem that it answers.
        ids: token ids of each turn and each answer after the prompt.
        columns: the engine's columns of sampled tokens, in the place of each turn; None in that of
            an answer.
        messages: the conversation so far.
        turns: of the policy, so far.
        reward: sum of what the environment gave; None after a failure.
        done: whether it has ended.
        finish_reason: why the last turn ended, as the engine says.
    """

    prompt: np.ndarray
    problem: Problem
    ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    columns: list[Mapping[str, np.ndarray] | None] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)
    turns: int = 0
    reward: float | None = 0.0
    done: bool = False
    finish_reason: str = "stop"

    def add(self, ids: np.ndarray, columns: Mapping[str, np.ndarray] | None = None) -> None:
        """Add a turn, or an answer, which has no columns."""
        self.ids.append(np.asarray(ids, np.int32))
        self.columns.append(columns)

    @property
    def token_ids(self) -> np.ndarray:
        """Token ids of prompt, turns and answers."""
        return np.concatenate([np.asarray(self.prompt, np.int32), *self.ids])

    @property
    def completion_ids(self) -> np.ndarray:
        """Token ids after the prompt."""
        return self.token_ids[len(self.prompt) :]

    def episode(self, group: int, member: int) -> Episode:
        """The whole completion."""
        lengths = [len(self.prompt), *map(len, self.ids)]
        sampled = [False, *(columns is not None for columns in self.columns)]
        sampled_mask = np.repeat(sampled, lengths)

        turns = [columns for columns in self.columns if columns is not None]
        episode_columns = {}
        for name in turns[0]:
            sampled_values = np.concatenate([turn[name] for turn in turns])
            episode_columns[name] = over_sequence(name, sampled_values, sampled_mask)
        return Episode(
            token_ids=self.token_ids,
            sampled_mask=sampled_mask,
            group=group,
            member=member,
            finish_reason=self.finish_reason,
            columns=episode_columns,
        )


def answer_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] = (),
    sampled: int | None = None,
    ends: Mapping[int, str] | None = None,
) -> str:
    """The template's text from the end token of one turn of the policy to the begin of the next.

    It begins behind the first end token that the template writes after the turn, if that was
    sampled. If another one was, or the template writes none, it is all that the template writes
    after the turn.

    Args:
        tokenizer: with the chat template.
        messages: the answers to the turn.
        variables: variables of the template.
        tools: JSON schemas of the tools.
        sampled: the token that ended the turn; None for the one that the template writes.
        ends: `end_texts` of all tokens that end turns; None for those of all special tokens.

    Raises:
        RewardError: in one line, if the template can't render the answers, or leaves out the turn or
            an answer.
    """
    role = messages[0]["role"]
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _MARK}]

    def after_turn(answers: Sequence[Message]) -> str:
        return render_chat(tokenizer, [*chat, *answers], tools, **variables).partition(_MARK)[2]

    try:
        after = after_turn(messages)
        # The text between the turn and the first answer. An end token is searched for in it alone:
        # an answer may hold the text of one.
        header = after_turn([{**messages[0], "content": _MARK}]).partition(_MARK)[0]
    except Exception as error:  # templates raise what they like
        raise RewardError(
            f"the chat template can't render the role {role!r}: {one_line(error)}"
        ) from error
    if not after or not all(is_written(message["content"].strip(), after) for message in messages):
        raise RewardError(
            "the chat template leaves out a turn of the policy, or the observation after it "
            f"(role {role!r}); it must write both for task.environment"
        )

    # A template may write another header for another content: then only what both share counts.
    header = os.path.commonprefix([header, after])
    if not ends:
        ends = end_texts(tokenizer)
    positions = {token: header.find(text) for token, text in ends.items() if text in header}
    if not positions:
        return after
    first_end = min(positions, key=positions.__getitem__)
    if sampled not in (None, first_end):
        return after
    return after[positions[first_end] + len(ends[first_end]) :]


def end_texts(
    tokenizer: PreTrainedTokenizerBase, ends: Collection[int] | None = None
) -> dict[int, str]:
    """The texts of tokens that end turns, by id, as a template writes them.

    Without `ends` of all special tokens.
    """
    added_tokens = tokenizer.added_tokens_decoder
    texts = {}
    for token, added in added_tokens.items():
        if ends is not None or added.special:
            texts[token] = added.content
    if not ends:
        return texts
    decode = token_text(tokenizer)
    return {token: texts.get(token) or decode(token) for token in ends}


def _with_space(match: re.Match[str]) -> str:
    """A control token with a space behind its first character."""
    token = match[0]
    return f"{token[0]} {token[1:]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRules:
    """How completions are played.

    Attributes:
        columns: names of the columns that environments get.
        turns: most turns of the policy in a completion.
        turn_tokens: most tokens that it samples in one turn.
        prompt_tokens: most tokens of a prompt with the first observation.
        prompt_suffix: end of the user's last message.
        variables: variables of the chat template.
        stop_on_error: whether a failure of the environment raises. Otherwise completions that were
            being played end without a reward.
    """

    columns: Sequence[str]
    turns: int
    turn_tokens: int
    prompt_tokens: int
    prompt_suffix: str
    variables: Mapping[str, Any]
    stop_on_error: bool


@dataclasses.dataclass
class TurnSampler:
    """Samples completions in turns.

    Attributes:
        engine: has the weights of the step.
        pool: the environments.
        tokenizer: the policy's.
        rules: turns, lengths, and what environments get.
        played: by completion, what the environment gave.
    """

    engine: Engine
    pool: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    rules: TurnRules
    played: dict[int, Played] = dataclasses.field(default_factory=dict)
    _warned: set[Any] = dataclasses.field(default_factory=set)

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

        The first turn draws as `Engine.generate` would. A later one numbers its rows by the
        completions that are still played, so a run on another number of hosts draws others there.

        Args:
            prompts: token ids of each problem.
            problems: the problem of each prompt.
            sampling: G, temperature, stop tokens; `max_completion_tokens` bounds all turns and
                answers together.
            seed, step, first_prompt: see `Engine.generate`.
            check_stop: called while waiting; what it raises ends the sampling.

        Raises:
            RewardError: in one line, if the environment fails and the sampler stops then.
            UserError: if a first observation makes a prompt too long or differs within a group.
        """
        self.played = {}
        group_size = sampling.group_size
        turn_tokens = min(self.rules.turn_tokens, sampling.max_completion_tokens)
        plays = []
        for prompt, problem in zip(prompts, problems, strict=True):
            plays += [_Play(prompt, problem) for _ in range(group_size)]
        role = self._begin(plays, group_size, check_stop)
        ends = end_texts(self.tokenizer, sampling.stop_token_ids)

        playing_rows = list(range(len(plays)))
        for turn in range(self.rules.turns):
            if not playing_rows:
                break
            # The completions of a group have one prompt in the first turn, later each its own.
            turn_group_size = group_size
            if turn > 0:
                turn_group_size = 1
            groups = self.engine.generate(
                [plays[row].token_ids for row in playing_rows[::turn_group_size]],
                dataclasses.replace(
                    sampling,
                    max_completion_tokens=turn_tokens,
                    group_size=turn_group_size,
                ),
                seed=seed + turn * _TURN_SEED_OFFSET,
                step=step,
                # Later turns number each completion as a prompt.
                first_prompt=first_prompt * group_size // turn_group_size,
            )
            groups_of_turn = []
            with contextlib.closing(groups):
                for group in groups:
                    check_stop()
                    groups_of_turn.append(group)
                    yield []  # nothing has ended; the caller may check whether to stop
            for row, episode in zip(playing_rows, collect(groups_of_turn), strict=True):
                self._add_turn(plays[row], episode)

            playing_rows = self._answer(
                plays,
                [row for row in playing_rows if plays[row].finish_reason == "stop"],
                role,
                turn,
                room=sampling.max_completion_tokens - turn_tokens,
                ends=ends,
                check_stop=check_stop,
            )
        self._finish(plays)
        yield [play.episode(*divmod(row, group_size)) for row, play in enumerate(plays)]

    def _add_turn(self, play: _Play, episode: Episode) -> None:
        """Add a turn of the policy to its completion."""
        ids = episode.completion_ids
        start = episode.prompt_length
        play.add(ids, {name: column[start:] for name, column in episode.columns.items()})
        if episode.finish_reason == "stop":
            ids = ids[:-1]
        play.messages.append({"role": "assistant", "content": self._text(ids)})
        play.turns += 1
        play.finish_reason = episode.finish_reason

    def _begin(
        self,
        plays: list[_Play],
        group_size: int,
        check_stop: Callable[[], None],
    ) -> str | None:
        """Reset the environments, and append their first observations to the prompts.

        Returns:
            The role of the later observations; None if the environment failed.
        """
        problems = [play.problem for play in plays]
        prompts = [problem.as_prompt for problem in problems]
        try:
            observations, role = self.pool.reset(
                prompts, columns_of(problems, self.rules.columns), check_stop
            )
        except RewardError as failure:
            self._failed(failure, plays)
            return None

        for row, text in enumerate(observations):
            play = plays[row]
            problem = play.problem
            first_row = row - row % group_size  # of its group
            where = f"row {problem.index} of {problem.source}"
            if text != observations[first_row]:
                raise RewardError(
                    f"environment {self.pool.name}: reset says other things to the completions of "
                    f"one prompt ({where}); it must depend on its arguments alone"
                )
            if not text:
                continue
            # Only warns: an environment's own text keeps its control tokens.
            self._without_control_tokens({"content": text})
            problem = dataclasses.replace(problem, prompt=f"{problem.prompt}\n\n{text}")
            chat = chat_messages(problem, self.rules.prompt_suffix)
            play.prompt = self._ids(
                render_chat(self.tokenizer, chat, problem.tools, **self.rules.variables)
            )
            if len(play.prompt) > self.rules.prompt_tokens:
                raise RewardError(
                    f"environment {self.pool.name}: the prompt of {where} has {len(play.prompt)} "
                    "tokens with the first observation, task.max_prompt_tokens is "
                    f"{self.rules.prompt_tokens}"
                )
        return role

    def _answer(
        self,
        plays: list[_Play],
        waiting: list[int],
        role: str | None,
        turn: int,
        *,
        room: int,
        ends: Mapping[int, str],
        check_stop: Callable[[], None],
    ) -> list[int]:
        """Let the environment answer ended turns; return the rows that play another one.

        Args:
            plays: all completions.
            waiting: rows whose turn ended.
            role: role of the answers, None if there are none any more.
            turn: number of this turn.
            room: most tokens that a completion may have where another turn begins.
            ends: `end_texts` of the tokens that end turns.
            check_stop: called while waiting.
        """
        if role is None or not waiting:
            return []
        texts = [plays[row].messages[-1]["content"] for row in waiting]
        try:
            steps = self.pool.step(waiting, texts, check_stop)
        except RewardError as failure:
            self._failed(failure, [plays[row] for row in waiting])
            return []

        playing_rows = []
        for row, (observations, reward, done) in zip(waiting, steps, strict=True):
            play = plays[row]
            play.reward += reward
            play.done = done
            if done or turn + 1 == self.rules.turns:
                continue
            messages = [
                {"role": role, **self._without_control_tokens(observation)}
                for observation in observations
            ]
            end = int(play.ids[-1][-1])
            text = answer_text(
                self.tokenizer,
                messages,
                self.rules.variables,
                play.problem.tools,
                sampled=end,
                ends=ends,
            )
            # Behind the end token, as in a whole chat: some tokenizers put a space before a text
            # that stands alone.
            ids = self._ids(ends.get(end, "") + text)
            if ids[0] == end:
                ids = ids[1:]
            else:
                ids = self._ids(text)

            if len(play.completion_ids) + len(ids) > room:
                play.finish_reason = "length"
                continue
            play.add(ids)
            play.messages += messages
            playing_rows.append(row)
        return playing_rows

    @functools.cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        return control_tokens(self.tokenizer)

    def _without_control_tokens(self, message: Message) -> Message:
        """A tool's result with a space in each control token of its text.

        What a tool gives comes from anywhere. An environment's text is its author's: it stays. Logs
        a warning once for each tool and token.
        """
        pattern = self._control_tokens
        text = message["content"]
        name = message.get("name")
        source = f"environment {self.pool.name}"
        consequence = "the model reads it as the chat's own"
        if name:
            source = f"the tool {name}"
            consequence = "a space breaks it"
            message = {**message, "content": pattern.sub(_with_space, text)}

        for token in sorted(set(pattern.findall(text))):
            if (source, token) not in self._warned:
                self._warned.add((source, token))
                _LOG.warning(
                    "%s answers with the control token %s in its text: %s",
                    source,
                    token,
                    consequence,
                )
        return message

    def _ids(self, text: str) -> np.ndarray:
        (ids,) = encode_texts(self.tokenizer, [text], "an environment's answer")
        return np.asarray(ids, np.int32)

    def _text(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _failed(self, failure: RewardError, plays: list[_Play]) -> None:
        """Stop, or end the completions that were played, without a reward."""
        if self.rules.stop_on_error:
            message = str(failure)
            if failure.row is not None:
                message += f" (completion {failure.row} of the batch)"
            raise RewardError(message) from failure
        for play in plays:
            play.reward = None
        if "failed" not in self._warned:
            self._warned.add("failed")
            _LOG.warning(
                "%s; the completions that were played get no reward. Later failures are only "
                "counted",
                failure,
            )

    def _finish(self, plays: list[_Play]) -> None:
        endless = sum(not play.done and play.turns == self.rules.turns for play in plays)
        if endless and "endless" not in self._warned:
            self._warned.add("endless")
            _LOG.warning(
                "environment %s: %d of %d completions ended by task.max_turns = %d, see "
                "environment/done_fraction",
                self.pool.name,
                endless,
                len(plays),
                self.rules.turns,
            )
        for row, play in enumerate(plays):
            ids = play.completion_ids
            self.played[row] = Played(
                reward=play.reward,
                messages=play.messages,
                text=self._text(ids),
                ids=ids,
                turns=play.turns,
                done=play.done,
            )

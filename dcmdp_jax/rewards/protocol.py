"""Reward functions: how one is named, loaded, called and checked.

The signature is TRL's, so a function written for it works here unchanged:

    def reward(prompts, completions, completion_ids, trainer_state, log_metric, log_extra,
    **columns)
        -> list[float | None]

`prompts` and `completions` have a text for each completion whose prompt is text in the data, and a
list of messages for one whose prompt is messages there; `completion_ids` has lists of token ids.
Every other column of the data is a keyword argument as it is, and so are `answer`, `source` and
`reference_answer` (`scoring.OWN_COLUMNS`). All have one element per completion. The function may be
`async def`.

A function with the signature of verl's `compute_score` works too, called once for each completion:

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score":
    float, ...}

It may be `async def` too, and must give a number, not None. Its arguments come from the columns of
verl's schema: `data_source`, `reward_model["ground_truth"]` (any JSON) and `extra_info`; without a
`reward_model`, from a column `ground_truth`.

None means that the completion has no value of this reward. As in TRL, it adds nothing to the
weighted sum, and a completion without any value gets 0.
"""

import asyncio
import dataclasses
import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from dcmdp_jax.errors import UserError
from dcmdp_jax.user_files import load_object

MATH = "math"
"""The reward of `rewards.math.verifier`, computed in the trainer's process and its workers."""

ENVIRONMENT = "environment"
"""The sum of what the environment of `task.environment` gave to the turns of a completion."""

BUILT_IN_REWARDS = {
    "last_number": "dcmdp_jax.rewards.math.answers:last_number",
    "math_verify": "dcmdp_jax.rewards.math.answers:math_verify",
}
"""Reward functions with short names."""

NEED_ANSWERS = (MATH, "last_number", "math_verify")
"""Rewards that compare with the reference answer."""

ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
"""Keyword arguments of every call, besides the columns."""

_VERL_COLUMNS = ("data_source", "reward_model", "ground_truth", "extra_info")
# Absolute value of a reward: advantages are float32.
_LARGEST = 1e9
# Characters of a name that a function logs under.
_LONGEST_NAME = 200

RewardFunction = Callable[..., Any]
Message = Mapping[str, Any]
LEARNED = "learned"
"""With the value False, the key of an assistant's message that is not to be learned."""


@dataclasses.dataclass(frozen=True)
class Problem:
    r"""One task: a question to the model, and the right answer.

    Attributes:
        prompt: text of the last user message, before any prompt suffix; of the last message if none
            is the user's.
        answer: reference answer in the verifier's notation (see `math.answers`); None for a row
            without one.
        source: where it comes from: the row's `data_source`, else the file's name without suffix.
        index: 0-based row number in its source.
        messages: the chat, where the row's prompt is messages; each has `role` and `content`, both
            text, and what else its template reads, such as `tool_calls`. Empty where the prompt is
            text.
        tools: the tools that the chat template describes, as JSON schemas.
        solution: a worked solution where the row has one, else empty. Where completions are
            learned, the text of one.
        completion: messages after the prompt, of which the assistant's are learned; then `solution`
            is empty. They are the whole chat of a row that has `messages` in place of a prompt.
        columns: the row's fields for reward functions, without the prompt; empty unless they were
            asked for.
    """

    prompt: str
    answer: str | None
    source: str
    index: int
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    solution: str = ""
    completion: tuple[Message, ...] = ()
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def as_prompt(self) -> str | list[Message]:
        """The prompt for reward functions, text or messages."""
        return list(self.messages) or self.prompt

    def as_completion(self, text: str) -> str | list[Message]:
        """A completion for reward functions, its text, or a message where the prompt is messages.

        As in TRL, the completion of a chat is a list of one message of the assistant.
        """
        return [{"role": "assistant", "content": text}] if self.messages else text


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Progress of the run for reward functions, by the names of transformers' `TrainerState`.

    Attributes:
        global_step: finished training steps.
        max_steps: training steps of the run.
        epoch: passes over the training problems that the finished steps have made.
    """

    global_step: int = 0
    max_steps: int = 0
    epoch: float = 0.0


BEGINNING = TrainerState()
"""The state before the first step of a run of no known length."""


class Logged:
    """Values that a reward function logs in one call, by TRL's `log_metric` and `log_extra`.

    Args:
        count: completions of the call.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Any]] = {}

    def log_metric(self, name: str, value: float) -> None:
        """Log a number of this call. Several under one name are averaged.

        Raises:
            TypeError: if the name is not text or the value not a number.
        """
        plain = plain_value(value)
        if not isinstance(plain, numbers.Real):
            raise TypeError(f"log_metric({name!r:.80}, {value!r:.80}): the value must be a number")
        self.metrics.setdefault(_log_name("log_metric", name), []).append(float(plain))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value for each completion, for samples.jsonl. The last values under one name count.

        Raises:
            TypeError: if the name is not text.
            ValueError: if there is not one value for each completion.
        """
        values = list(values)
        if len(values) != self._count:
            raise ValueError(
                f"log_extra({column!r:.80}, ...): got {len(values)} values for {self._count} "
                "completions, must be one for each"
            )
        self.extra[_log_name("log_extra", column)] = values


def _log_name(function: str, name: Any) -> str:
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME:
        raise TypeError(
            f"{function}({name!r:.80}, ...): the name must be text of at most {_LONGEST_NAME} "
            "characters"
        )
    return name


class RewardError(UserError):
    """A reward function that is missing, raises, hangs, or returns no rewards. One line.

    Attributes:
        row: place of the completion in its batch that the error is about; None if it is about all.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


@dataclasses.dataclass(frozen=True)
class Reward:
    """A reward and its weight in the total.

    Attributes:
        function: `math`, a name in `BUILT_IN_REWARDS`, `module:function` or `path.py:function`.
        weight: factor in the weighted sum of all rewards.
    """

    function: str
    weight: float = 1.0


def short_names(functions: Sequence[str]) -> list[str]:
    """The functions' own names; the whole name where two are equal."""
    short = [function.rpartition(":")[2] for function in functions]
    names = []
    for name, function in zip(short, functions, strict=True):
        if short.count(name) > 1:
            name = function
        names.append(name)
    return names


def load_reward(function: str, columns: Sequence[str]) -> RewardFunction:
    """Import a reward function and check that it accepts its arguments.

    Args:
        function: a name in `BUILT_IN_REWARDS`, `module:function`, or `path.py:function` from the
            working directory.
        columns: names of the columns that it will get.

    Raises:
        RewardError: if the file, the module or the function is missing, the import raises, or the
            function takes other arguments.
    """
    name = function.rpartition(":")[2]
    try:
        loaded = load_object(BUILT_IN_REWARDS.get(function, function), "function")
    except UserError as error:
        raise RewardError(f"reward {error}") from error
    try:
        signature = inspect.signature(loaded)
    except ValueError:  # some functions written in C have no signature
        return loaded
    if "solution_str" in signature.parameters:  # no function of TRL's signature has it
        return _from_verl(loaded, signature)
    arguments = dict.fromkeys((*ARGUMENTS, *columns))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise RewardError(
            f"reward {function}: can't be called as {name}({', '.join(arguments)}): {error}; "
            "end its parameters with **columns, and name only columns of the data"
        ) from None
    return loaded


def _from_verl(compute_score: Callable[..., Any], signature: inspect.Signature) -> RewardFunction:
    """A function of TRL's signature that calls one of verl's with the arguments that it takes.

    The other values of a dict that `compute_score` returns are logged by `log_extra`, under the
    names that they have.
    """
    parameters = signature.parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def reward(
        completions: Sequence[Any],
        log_extra: Callable[[str, list[Any]], None],
        **columns: Sequence[Any],
    ) -> list[Any]:
        scores = []
        for row, completion in enumerate(completions):
            arguments = dict.fromkeys(_VERL_COLUMNS)
            for name in arguments.keys() & columns.keys():
                arguments[name] = columns[name][row]
            model = arguments.pop("reward_model")
            # The column `reward_model` holds the answer, as for verl's own reward managers.
            if isinstance(model, Mapping):
                arguments["ground_truth"] = model.get("ground_truth")
            arguments["solution_str"] = completion_text(completion)
            if not takes_all:
                for name in arguments.keys() - parameters.keys():
                    del arguments[name]
            scores.append(compute_score(**arguments))
        if any(map(inspect.isawaitable, scores)):
            scores = asyncio.run(gathered(scores))

        # A score is a number, or a dict of it and further values.
        results = []
        for row, score in enumerate(scores):
            result = {"score": score}
            if isinstance(score, Mapping):
                result = score
            results.append(result)
            if result.get("score") is None:
                raise RewardError(
                    f"returned {shown(score)}, needs a number, or a dict with one under 'score'",
                    row,
                )
        # Every name of any row, in the order of its first row; None for a row without it.
        for name in dict.fromkeys(itertools.chain.from_iterable(results)):
            if name != "score":
                log_extra(str(name), [result.get(name) for result in results])
        return [result["score"] for result in results]

    return reward


def completion_text(completion: str | Sequence[Message]) -> str:
    """Text of a completion as reward functions get it: itself, or its messages' contents."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def call_reward(
    function: RewardFunction,
    prompts: Sequence[str | list[Message]],
    completions: Sequence[str | list[Message]],
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence[Any]],
    state: TrainerState,
    logged: Logged,
) -> list[float | None]:
    """Call a reward function, async or not, and check what it returns.

    Args:
        function: the function.
        prompts, completions, completion_ids: one per completion.
        columns: the other columns, one element per completion.
        state: the run's progress.
        logged: takes what the function logs.

    Raises:
        RewardError: if it does not return one finite number or None per completion. It does not
            name the function.
        Exception: any exception of the function.
    """
    count = len(completions)  # the function may change the list
    values = function(
        prompts=prompts,
        completions=completions,
        completion_ids=completion_ids,
        trainer_state=state,
        log_metric=logged.log_metric,
        log_extra=logged.log_extra,
        **columns,
    )
    if inspect.isawaitable(values):
        values = asyncio.run(gathered([values]))[0]
    # A dict gives its keys and a set has no order; text gives letters.
    if isinstance(values, Mapping | Set | str | bytes) or not isinstance(values, Iterable):
        raise RewardError(f"returned {shown(values)}, needs a list with one reward per completion")
    if isinstance(values, Iterator):  # it may never end
        values = itertools.islice(values, count + 1)
    try:
        values = list(values)
    except TypeError:  # an array without dimensions
        raise RewardError(
            f"returned {shown(values)}, needs a list with one reward per completion"
        ) from None
    if len(values) != count:
        raise RewardError(
            f"returned {len(values)} rewards for {count} completions, needs one for each"
        )
    return [_check_value(row, value) for row, value in enumerate(values)]


def shown(value: Any) -> str:
    """The start of a value's text, after its type."""
    if value is None:
        return "None"
    return f"the {type(value).__name__} {value!r:.80}"


def weighted_total(
    values: Sequence[Sequence[float | None]], weights: Sequence[float]
) -> list[float]:
    """Weighted sum of several rewards for each completion, 0 for one without any value.

    Args:
        values: for each reward, one value per completion; None adds nothing.
        weights: one per reward.
    """
    totals = []
    for row in zip(*values, strict=True):
        pairs = zip(weights, row, strict=True)
        totals.append(math.fsum(weight * value for weight, value in pairs if value is not None))
    return totals


async def gathered(values: Sequence[Any]) -> list[Any]:
    """The values, awaitable ones awaited at once."""

    async def value_of(value: Any) -> Any:
        if inspect.isawaitable(value):
            value = await value
        return value

    return await asyncio.gather(*map(value_of, values))


def _check_value(row: int, value: Any) -> float | None:
    if value is None:
        return None
    # NumPy's and torch's scalars have item().
    plain = plain_value(value)
    # The float first: a subclass may say another one than what isfinite sees.
    number = math.nan
    if isinstance(plain, numbers.Real):
        number = float(plain)
    if not math.isfinite(number):
        raise RewardError(f"returned {value!r:.80}, needs a finite number or None", row)
    if abs(number) > _LARGEST:
        raise RewardError(
            f"returned {plain}, needs a number of at most {_LARGEST:g}: advantages are float32", row
        )
    return number


def plain_value(value: Any) -> Any:
    """A scalar of NumPy or torch as Python's; anything else as it is."""
    try:
        if hasattr(value, "item"):
            return value.item()
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        pass
    return value

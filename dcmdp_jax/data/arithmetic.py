r"""Chains of small arithmetic: a task that a model of a million parameters can learn on a CPU.

    prompt     4*6-7+9=?
    solution   4*6=24;24-7=17;17+9=26;\boxed{26}

`arithmetic:difficulty=7,chat=true` is for a published model: the sum of two numbers below 30, as a
chat.

Every step is one operation on the running value, so the answer needs few facts but a chain of them,
and one wrong step spoils it. Problems are a function of the seed. Train and held-out problems are
disjoint for all seeds: the text of a problem decides which split it belongs to.
"""

import dataclasses
import random
import re
import zlib
from typing import TYPE_CHECKING, Any, Literal, Self

from dcmdp_jax.data.mixtures import task_arguments
from dcmdp_jax.data.rows import problem_from_row
from dcmdp_jax.errors import UserError
from dcmdp_jax.rewards.protocol import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
UNKNOWN = "<|unknown|>"
WHOLE_PIECES = (r"\boxed{", "system", "user", "assistant")

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | map(attribute='function.name') | join(',') "
    "}}<|im_end|>\n{% endif %}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ "
    "message['content'] }}{% for call in message['tool_calls'] %}<tool_call>{{ call['function'] | "
    "tojson(separators=(',', ':')) }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_HELD_OUT_SHARE = 8
"""One problem in this many, by the checksum of its text, is held out."""

_Step = tuple[int, str, int, int]
# Draws without a new problem after which a difficulty has no more.
_FRUITLESS_DRAWS = 20_000
# What a wrong result is off by.
_ERROR_SIZES = (-10, -2, -1, 1, 2, 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Level:
    operations: int
    largest_value: int
    largest_operand: int = 9
    first_operators: str = "+-"
    later_operators: str = "+-"


LEVELS: dict[int, _Level] = {
    1: _Level(operations=2, largest_value=27),
    2: _Level(operations=3, largest_value=36),
    3: _Level(operations=3, largest_value=99, first_operators="+-*"),
    4: _Level(operations=4, largest_value=99, first_operators="+-*", later_operators="+-*"),
    5: _Level(
        operations=5,
        largest_value=999,
        largest_operand=20,
        first_operators="+-*",
        later_operators="+-*",
    ),
    6: _Level(operations=24, largest_value=99),
    7: _Level(operations=1, largest_value=58, largest_operand=29, first_operators="+"),
}
"""Difficulties. Where a product may only stand first, the steps run left to right."""


@dataclasses.dataclass(frozen=True)
class ArithmeticSpec:
    """A set of problems to generate.

    Attributes:
        difficulty: key of `LEVELS`: 1 and 2 are two and three sums or differences of digits, 3 may
            have a product in front, 4 has products anywhere, 5 has numbers up to 20 and values up
            to 999, 7 is a sum of two numbers below 30. Levels 1 and 7 have few problems.
        count: number of distinct problems.
        seed: random seed; a larger count extends the problems of a smaller one.
        split: "train" or "heldout".
        error_rate: share of the worked solutions in [0, 1] that hold one wrong intermediate result,
            carried on consistently to a wrong box. Reference answers stay right. A policy warmed up
            on such solutions knows the steps and errs about that often, which reinforcement
            learning can correct.
        chat: the prompt is a chat for a published model, whose last turn is the assistant's begun
            "12 + 5 =", so that the answer is what comes next.

    Raises:
        UserError: if a value is out of range.
    """

    difficulty: int = 2
    count: int = 4096
    seed: int = 0
    split: Literal["train", "heldout"] = "train"
    error_rate: float = 0.0
    chat: bool = False

    def __post_init__(self) -> None:
        if self.difficulty not in LEVELS:
            raise UserError(
                f"arithmetic difficulty = {self.difficulty}: must be one of "
                f"{', '.join(map(str, LEVELS))}"
            )
        if self.count < 1:
            raise UserError(f"arithmetic count = {self.count}: must be at least 1")
        if self.split not in ("train", "heldout"):
            raise UserError(f"arithmetic split = {self.split!r}: must be train or heldout")
        if not 0.0 <= self.error_rate <= 1.0:
            raise UserError(f"arithmetic error_rate = {self.error_rate}: must be from 0 to 1")

    @classmethod
    def parse(cls, location: str) -> Self:
        """Parse `arithmetic:difficulty=2,count=4096,seed=0`, any keys in any order, or none.

        Raises:
            UserError: if a key is unknown or given twice, a value is ill-typed or out of range.
        """
        truth = {"true": True, "false": False}
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        settings = location.partition(":")[2]
        for key, value in task_arguments(location, settings, types).items():
            try:
                if types[key] is bool:
                    values[key] = truth[value]
                    continue
                # int() and float() also take the digits of other scripts.
                if not value.isascii():
                    raise ValueError
                values[key] = types[key](value)
            except (KeyError, ValueError):
                raise UserError(
                    f"task {location}: {key} = {value!r} is not {types[key].__name__}"
                ) from None
        return cls(**values)


def arithmetic_rows(spec: ArithmeticSpec) -> list[dict[str, Any]]:
    """Generate the problems as rows in the schema of DAPO-Math-17K, with a worked `solution`.

    Raises:
        UserError: if the difficulty has fewer distinct problems than `count` in this split.
    """
    level = LEVELS[spec.difficulty]
    draw = random.Random(f"arithmetic {spec.difficulty} {spec.split} {spec.seed}")
    noise = random.Random(f"errors {spec.difficulty} {spec.split} {spec.seed}")

    rows = []
    seen = set()
    fruitless = 0
    while len(rows) < spec.count and fruitless < _FRUITLESS_DRAWS:
        fruitless += 1
        numbers, operators = _expression(draw, level)
        text = _text(numbers, operators)
        held_out = zlib.crc32(text.encode()) % _HELD_OUT_SHARE == 0
        if text in seen or held_out != (spec.split == "heldout"):
            continue
        steps = _steps(numbers, operators)
        if not _in_range(steps, level):
            continue

        seen.add(text)
        fruitless = 0
        *_, result = steps[-1]
        if noise.random() < spec.error_rate:
            steps = _spoiled(numbers, operators, level, noise)
        prompt = [{"role": "user", "content": f"{text}=?"}]
        if spec.chat:
            prompt = _chat(text)
        rows.append(
            {
                "data_source": "arithmetic",
                "prompt": prompt,
                "ability": "math",
                "reward_model": {"ground_truth": str(result), "style": "rule"},
                "extra_info": {"index": len(rows), "split": spec.split},
                "solution": _solution(steps),
            }
        )

    if len(rows) < spec.count:
        raise UserError(
            f"arithmetic difficulty {spec.difficulty} has no {spec.count} distinct {spec.split} "
            f"problems (found {len(rows)}): lower count or raise difficulty"
        )
    return rows


def arithmetic_problems(spec: ArithmeticSpec, *, keep_columns: bool = False) -> list[Problem]:
    """`arithmetic_rows` as problems; their prompts are text, but for `chat`.

    Args:
        spec: the problems to make.
        keep_columns: whether they have `columns`.

    Raises:
        UserError: see `arithmetic_rows`.
    """
    problems = []
    for index, row in enumerate(arithmetic_rows(spec)):
        if not spec.chat:
            row["prompt"] = row["prompt"][0]["content"]
        problem = problem_from_row(row, source="arithmetic", index=index, keep_columns=keep_columns)
        problems.append(problem)
    return problems


def _chat(text: str) -> list[dict[str, str]]:
    spaced = re.sub(r"([+*-])", r" \1 ", text)
    return [
        {"role": "system", "content": "You add numbers."},
        {"role": "user", "content": spaced},
        {"role": "assistant", "content": f"{spaced} ="},
    ]


def _expression(draw: random.Random, level: _Level) -> tuple[list[int], list[str]]:
    numbers = [draw.randint(1, level.largest_operand) for _ in range(level.operations + 1)]
    operators = [draw.choice(level.first_operators)]
    operators += [draw.choice(level.later_operators) for _ in range(level.operations - 1)]
    return numbers, operators


def _text(numbers: list[int], operators: list[str]) -> str:
    pairs = zip(operators, numbers[1:], strict=True)
    return str(numbers[0]) + "".join(f"{operator}{number}" for operator, number in pairs)


def _steps(
    numbers: list[int],
    operators: list[str],
    wrong: int | None = None,
    error: int = 0,
) -> list[_Step]:
    """(first, operator, second, result) in the order worked: products first, from the left."""
    numbers = list(numbers)
    operators = list(operators)
    steps = []
    while operators:
        position = 0
        if "*" in operators:
            position = operators.index("*")
        first = numbers[position]
        operator = operators.pop(position)
        second = numbers.pop(position + 1)
        result = {"+": first + second, "-": first - second, "*": first * second}[operator]
        if len(steps) == wrong:
            result += error
        steps.append((first, operator, second, result))
        numbers[position] = result
    return steps


def _in_range(steps: list[_Step], level: _Level) -> bool:
    return all(0 <= result <= level.largest_value for *_, result in steps)


def _spoiled(
    numbers: list[int],
    operators: list[str],
    level: _Level,
    noise: random.Random,
) -> list[_Step]:
    """The steps with one result off and carried on, every value in the level's range."""
    candidates = []
    for wrong in range(len(operators)):
        for error in _ERROR_SIZES:
            steps = _steps(numbers, operators, wrong, error)
            if _in_range(steps, level):
                candidates.append(steps)
    return noise.choice(candidates)


def _solution(steps: list[_Step]) -> str:
    text = ""
    for first, operator, second, result in steps:
        text += f"{first}{operator}{second}={result};"
    return rf"{text}\boxed{{{result}}}"


def build_tokenizer() -> "PreTrainedTokenizerFast":
    r"""Build the task's tokenizer, in Hugging Face format; its ids are always the same.

    Printable ASCII characters and the line break are one token each, and so are `\boxed{` and the
    chat roles. Three special tokens are named as in Qwen. Decoding an encoding returns the same
    text.

    The end-of-sequence token is `<|im_end|>`, padding `<|endoftext|>`. A character outside
    printable ASCII and the line break becomes the unknown token.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = (PAD_TOKEN, TURN_START, TURN_END, UNKNOWN)
    pieces = (*special, *WHOLE_PIECES, "\n", *map(chr, range(32, 127)))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    escaped = "|".join(WHOLE_PIECES).replace("\\", r"\\").replace("{", r"\{")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{escaped}|[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )

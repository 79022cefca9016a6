r"""An environment of your own: arithmetic with a calculator, in turns, on a laptop CPU.

    dcmdp train --config=examples/plugins/calculator.py  # a minute to a few

    prompt     4*6-7+9=?
    turn 1     calc(4*6-7+9)
    answered   26
    turn 2     \boxed{26}

A turn that ends with `calc(...)` is answered by the value; any other ends the completion. The
reward is 1 for a last box that equals the reference answer, else 0.

A fresh 0.3M-parameter Qwen3 learns it from an fp8 engine. A supervised warm-up on worked turns, of
which half have a wrong digit, gives a policy that knows the form and errs. Seen on a loaded 2-core
Xeon in 145 s of processor time: held-out avg@8 from 35.5% to 84.8%; lambda rises from 0.10 to 0.20
while the discrepancy is over c, and is 0 again at the end.

With `:tools` the calculator is a Python function that the chat template describes, and the model
calls it in the template's own format; the reward is `math`:

    turn 1     <tool_call>{"name":"calc","arguments":{"x":"4*6-7+9"}}</tool_call>

A call has five times the tokens, so the warm-up is longer: in 336 s of processor time held-out
avg@8 goes from 32.2% to 81.6%, lambda from 0.10 to 0.
"""

import json
import random
import re
from typing import Any

from dcmdp_jax.data.arithmetic import ArithmeticSpec, arithmetic_rows
from dcmdp_jax.rewards.math.notation import last_boxed

_TASK = "examples/plugins/calculator.py:calculator"
_CALL = re.compile(r"calc\(([^()]*)\)\s*\Z")
_EXPRESSION = re.compile(r"\d{1,6}(?:[+*-]\d{1,6}){0,15}")


def get_config(arg: str = "") -> Any:
    """The run."""
    from configs import base, demo

    tools = "tools" in arg.split(",")
    config = demo.get_config()
    config.run_dir = "runs/calculator"
    config.task.train = f"{_TASK},difficulty=2,count=2048,seed=0"
    config.task.environment = "examples/plugins/calculator.py:Calculator"
    config.task.max_turns = 3
    config.task.max_turn_tokens = 16
    config.rewards.functions = "environment"
    config.rollout.max_completion_tokens = 48
    # Boxes and calls are copied, so the policy is sure of its tokens and the engines differ less
    # than in the demo.
    config.algorithm.tolerance_steps = 0
    config.algorithm.tolerance = 0.0006
    config.training.micro_batch_tokens = 1496
    config.warmup.task = f"{_TASK},difficulty=2,count=8192,seed=1,error_rate=0.5,worked=true"
    config.evaluation.task = f"{_TASK},difficulty=2,count=64,split=heldout"
    if tools:
        config.run_dir = "runs/calculator_tools"
        config.task.environment = "tools:examples/plugins/calculator.py:calc"
        config.task.max_prompt_tokens = 32
        config.task.max_turn_tokens = 72
        config.rewards.functions = "math"
        config.rollout.max_completion_tokens = 160
        config.training.micro_batch_tokens = 4096
        config.warmup.task += ",tools=true"
        config.warmup.steps = 1500
    return base.with_options(config, arg, own=("tools",))


def calculator(
    *,
    difficulty: int = 2,
    count: int = 4096,
    seed: int = 0,
    split: Any = "train",
    error_rate: float = 0.0,
    worked: bool = False,
    tools: bool = False,
) -> list[dict[str, Any]]:
    r"""Rows of problems: those of `arithmetic:...`.

    With `worked` each problem is there twice: with the first turn as its solution, `calc(4*6-7+9)`;
    and, as a chat that goes on after the answer, with the second, `\boxed{26}`. A share
    `error_rate` of either has one digit wrong, so that a policy that starts from them errs, which
    reinforcement learning can correct. With `tools` the calls are those of the tool `calc`.
    """
    if not isinstance(worked, bool):
        raise ValueError(f"worked = {worked!r} is not true or false")
    rows = [_row(row) for row in arithmetic_rows(ArithmeticSpec(difficulty, count, seed, split))]
    if not worked:
        return rows
    noise = random.Random(f"calculator {difficulty} {split} {seed}")
    turns = []
    for row in rows:
        asked = row["prompt"]
        answer = row["reward_model"]["ground_truth"]
        call = f"calc({asked.removesuffix('=?')})"
        if tools:
            called = {"name": "calc", "arguments": {"x": asked.removesuffix("=?")}}
            call = f"<tool_call>{json.dumps(called, separators=(',', ':'))}</tool_call>"
        said = (("user", asked), ("assistant", call), ("tool" if tools else "user", answer))
        chat = [{"role": role, "content": content} for role, content in said]
        wrong = [noise.random() < error_rate for _ in range(2)]
        turns.append(row | {"solution": _with_other_digit(call, noise) if wrong[0] else call})
        boxed = _with_other_digit(answer, noise) if wrong[1] else answer
        turns.append(row | {"prompt": chat, "solution": rf"\boxed{{{boxed}}}"})
    return turns


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["prompt"][0]["content"], "reward_model": row["reward_model"]}


def _with_other_digit(text: str, noise: random.Random) -> str:
    """The text with another digit in the place of one."""
    place = noise.choice([place for place, character in enumerate(text) if character.isdigit()])
    other = noise.choice([digit for digit in "0123456789" if digit != text[place]])
    return text[:place] + other + text[place + 1 :]


class Calculator:
    """One completion with a calculator."""

    def reset(self, prompt: Any, reference_answer: str | None = None, **columns: Any) -> None:
        """Keep the answer."""
        self._answer = reference_answer

    def step(self, text: str) -> tuple[str, float, bool]:
        """The value of the expression that the text calls for, or the box's reward and the end."""
        if call := _CALL.search(text):
            return value_of(call[1]), 0.0, False
        return "", float(self._answer is not None and last_boxed(text) == self._answer), True


def calc(x: str) -> str:
    """Compute.

    Args:
        x: sums, differences and products of whole numbers
    """
    return value_of(x)


def value_of(expression: str) -> str:
    """The value of sums, differences and products of whole numbers; "error" for anything else."""
    if not _EXPRESSION.fullmatch(expression):
        return "error"
    total = 0
    for sign, product in re.findall(r"([+-]?)([\d*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return str(total)

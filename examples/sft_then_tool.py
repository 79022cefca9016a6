r"""First the format of a tool call from conversations, then rewards with the tool, on a CPU.

    dcmdp sft --config=examples/sft_then_tool.py:sft
    dcmdp convert export runs/tool_format models/tool_format
    dcmdp train --config=examples/sft_then_tool.py --config.model.path=models/tool_format

    prompt     12+5=?
    turn 1     <tool_call>{"name":"add","arguments":{"a":12,"b":5}}</tool_call>
    answered   17
    turn 2     \boxed{17}

A fresh 0.3M-parameter Qwen3 reads conversations until it writes calls. Half of them add a wrong
number, as it then does too; the reward `math` corrects that on other sums.
"""

import random
from collections.abc import Iterator
from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def conversations(count: int = 8192, wrong: float = 0.5) -> Iterator[dict[str, Any]]:
    """Rows for `dcmdp sft`, of which a share calls the tool with a wrong number."""
    draw = random.Random(0)
    for _ in range(count):
        a, b = _sum(draw, held_out=False)
        c = b
        if draw.random() < wrong:
            c = draw.randrange(1, 100)
        call = {"name": "add", "arguments": {"a": a, "b": c}}
        yield {
            "messages": [
                {"role": "system", "content": "add"},
                {"role": "user", "content": f"{a}+{b}=?"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": call}],
                },
                {"role": "tool", "content": str(add(a, c))},
                {"role": "assistant", "content": rf"\boxed{{{add(a, c)}}}"},
            ]
        }


def problems(count: int, held_out: bool = False) -> Iterator[dict[str, str]]:
    """Rows for `dcmdp train`."""
    draw = random.Random(1)
    for _ in range(count):
        a, b = _sum(draw, held_out=held_out)
        yield {"prompt": f"{a}+{b}=?", "answer": str(a + b)}


def _sum(draw: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Two numbers; every tenth pair is held out."""
    while True:
        a, b = draw.randrange(1, 100), draw.randrange(1, 100)
        if ((a + 3 * b) % 10 == 0) == held_out:
            return a, b


def get_config(arg: str = "") -> Any:
    """The run with rewards; `:sft` is the one before it."""
    from configs import base, demo

    config = demo.get_config()
    config.warmup.steps = 0
    config.task.max_prompt_tokens = 32
    config.rollout.max_completion_tokens = 176
    config.training.micro_batch_tokens = 4096
    config.evaluation.task = "examples/sft_then_tool.py:problems,count=64,held_out=true"
    if "sft" in arg.split(","):
        config.run_dir = "runs/tool_format"
        config.task.train = "examples/sft_then_tool.py:conversations"
        config.evaluation.every_steps = 0
        config.training.steps = 600
        config.training.prompts_per_step = config.training.prompts_per_mini_batch = 32
        config.optimizer.learning_rate = 1e-3
    else:
        config.run_dir = "runs/tool_rewards"
        config.task.train = "examples/sft_then_tool.py:problems,count=2048"
        config.task.environment = "tools:examples/sft_then_tool.py:add"
        config.task.max_turns = 2
        config.task.max_turn_tokens = 80
        config.rewards.functions = "math"
    return base.with_options(config, arg, own=("sft",))

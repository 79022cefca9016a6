r"""First the format of a tool call from conversations, then rewards with the tool, on a CPU.

    dcmdp sft --config=examples/sft_then_tool.py:sft
    dcmdp convert export runs/tool_format models/tool_format
    dcmdp train --config=examples/sft_then_tool.py --config.model.path=models/tool_format

    prompt     12+5=?
    turn 1     <tool_call>{"name":"add","arguments":{"a":12,"b":5}}</tool_call>
    answered   17
    turn 2     \boxed{17}

A fresh 0.3M-parameter Qwen3 reads 600 conversations (tool_rows.jsonl) until it writes calls, with
wrong digits in many; then the reward `math` corrects these on 512 other sums
(tool_problems.jsonl).
"""

from typing import Any


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them
        b: the other
    """
    return a + b


def get_config(arg: str = "") -> Any:
    """The run with rewards; `:sft` is the one before it."""
    from configs import base, demo

    config = demo.get_config()
    config.warmup.steps = 0
    config.task.max_prompt_tokens = 32
    config.rollout.max_completion_tokens = 120
    config.training.micro_batch_tokens = 4096
    config.evaluation.task = "examples/tool_problems_held_out.jsonl"
    if "sft" in arg.split(","):
        config.run_dir = "runs/tool_format"
        config.task.train = "examples/tool_rows.jsonl"
        config.evaluation.every_steps = 0
        config.training.steps = 600
        config.training.prompts_per_step = config.training.prompts_per_mini_batch = 32
        config.optimizer.learning_rate = 1e-3
    else:
        config.run_dir = "runs/tool_rewards"
        config.task.train = "examples/tool_problems.jsonl"
        config.task.environment = "tools:examples/sft_then_tool.py:add"
        config.task.max_turns = 2
        config.task.max_turn_tokens = 60
        config.rewards.functions = "math"
    return base.with_options(config, arg, own=("sft",))

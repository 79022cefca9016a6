"""The reward functions of TRL's documentation, as users copy them.

From docs/source/grpo_trainer.md and trl/rewards.

Written out from their documented signatures and results; only the log messages and the slow call
are shortened.
"""

import asyncio
import re


# Example 1: reward longer completions; by the token ids, and by the text of a prompt that is text.
def reward_ids(completion_ids, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of token
    count).
    """
    return [float(len(ids)) for ids in completion_ids]


def reward_text(completions, **kwargs):
    """Reward function that assigns higher scores to longer completions (in terms of character
    count).
    """
    return [float(len(completion)) for completion in completions]


# Example 2: reward completions with a specific format, for chats.
def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]


# trl.rewards.think_format_reward.
def think_format_reward(completions, **kwargs):
    pattern = r"^<think>(?!.*<think>)(.*?)</think>.*$"
    contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content, re.DOTALL | re.MULTILINE) for content in contents]
    return [1.0 if match else 0.0 for match in matches]


# Example 3: reward completions by a reference.
def reference_reward(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


# Example 4: several tasks, None where a function does not apply.
def math_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for prompt, completion, t in zip(prompts, completions, task, strict=True):
        rewards.append(
            float(completion[0]["content"] in prompt[-1]["content"]) if t == "math" else None
        )
    return rewards


def coding_reward_func(prompts, completions, task, **kwargs):
    rewards = []
    for _, completion, t in zip(prompts, completions, task, strict=True):
        rewards.append(float("def" in completion[0]["content"]) if t == "coding" else None)
    return rewards


# Example 5: a function that waits for others.
async def async_reward_func(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(completion[0]["content"])) for completion in completions]


# Example 6, and trl.rewards.accuracy_reward: what a function logs.
def accuracy_reward(completions, solution, log_extra=None, log_metric=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    rewards = [
        1.0 if sol and sol in content else (0.0 if sol else None)
        for content, sol in zip(contents, solution, strict=True)
    ]
    if log_extra:
        log_extra("solution", list(solution))
        log_extra("extracted_answer", [content[:5] for content in contents])
    if log_metric:
        known = [reward for reward in rewards if reward is not None]
        log_metric("accuracy", sum(known) / len(known) if known else 0.0)
    return rewards


# The trainer's state, as in a reward that changes with training.
def scheduled_reward(completions, trainer_state, **kwargs):
    share = trainer_state.global_step / max(1, trainer_state.max_steps)
    return [share] * len(completions)

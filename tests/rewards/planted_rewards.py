"""Reward functions, right and wrong ones, as a user might write them."""

import os
import time


def length(prompts, completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def begins_with_a_multiple_of_eight(completions, completion_ids, **columns):
    return [float(ids[0] % 8 == 0) for ids in completion_ids]


async def starts_like_the_prompt(prompts, completions, **columns):
    return [float(completion.startswith(prompt)) for prompt, completion in zip(prompts, completions, strict=True)]


def only_for_algebra(completions, source, **columns):
    return [1.0 if name == "algebra" else None for name in source]


def raises(completions, **columns):
    raise KeyError("two\nlines")  # line 20


def one_too_few(completions, **columns):
    return [0.0] * (len(completions) - 1)


def not_a_number(completions, **columns):
    return [0.0] * (len(completions) - 1) + [float("nan")]


def text(completions, **columns):
    return ["good"] * len(completions)


def nothing(completions, **columns):
    pass


def enormous(completions, **columns):
    return [1e30] * len(completions)


def never_returns(completions, **columns):
    time.sleep(10_000)


def dies(completions, **columns):
    os.abort()


def takes_only_completions(completions):
    return [0.0] * len(completions)


def needs_a_rubric(completions, rubric, **columns):
    return [0.0] * len(completions)


not_callable = 3

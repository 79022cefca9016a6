"""Reward functions, right and wrong ones, as a user might write them."""

import itertools
import os
import signal
import subprocess
import threading
import time

import numpy as np


def length(prompts, completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def begins_with_a_multiple_of_eight(completions, completion_ids, **columns):
    return [float(ids[0] % 8 == 0) for ids in completion_ids]


async def starts_like_the_prompt(prompts, completions, **columns):
    return [
        float(completion.startswith(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def only_for_algebra(completions, source, **columns):
    return [1.0 if name == "algebra" else None for name in source]


def raises(completions, **columns):
    raise KeyError("two\nlines")


def one_too_few(completions, **columns):
    return [0.0] * (len(completions) - 1)


def not_a_number(completions, **columns):
    return [0.0] * (len(completions) - 1) + [float("nan")]


def text(completions, **columns):
    return ["good"] * len(completions)


def nothing(completions, **columns):
    pass


def pops(completions, **columns):
    completions.pop()
    return [1.0] * len(completions)


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


def a_dict(completions, **columns):
    return dict.fromkeys(range(len(completions)), 1.0)


def a_set(completions, **columns):
    return {float(k) for k in range(len(completions))}


def a_text(completions, **columns):
    return "1" * len(completions)


def an_array(completions, **columns):
    return np.arange(len(completions), dtype=np.float32)


def an_iterator(completions, **columns):
    return map(float, range(len(completions)))


def never_ends(completions, **columns):
    return itertools.repeat(1.0)


def forks(completions, completion_ids, **columns):
    os.fork()
    return [float(os.getpid() > 0) * len(ids) for ids in completion_ids]


def forks_and_fails_there(completions, completion_ids, **columns):
    if os.fork() == 0:
        raise ValueError("in the second process")
    os.wait()
    return [len(ids) for ids in completion_ids]


def writes_to_descriptors(completions, completion_ids, source, **columns):
    """Write what `source` says, as hexadecimal text, to every socket that is open."""
    for descriptor in _sockets():
        os.write(descriptor, bytes.fromhex(source[0]))
    return [len(ids) for ids in completion_ids]


def writes_later(completions, completion_ids, **columns):
    """Write to every open socket after the call, where it did not before."""
    threading.Timer(
        0.2, lambda: [os.write(descriptor, b"late") for descriptor in _sockets()]
    ).start()
    return [len(ids) for ids in completion_ids]


def allocates(completions, source, **columns):
    return [len(bytearray(int(size))) for size in source]


def starts_processes(completions, source, **columns):
    """Start a program and a process without a parent, then sleep or return.

    Their ids are written to the file `source`.
    """
    program = subprocess.Popen(["sleep", "10000"])
    if os.fork() == 0:
        orphan = os.fork()
        if orphan == 0:
            time.sleep(10_000)
        with open(source[0], "w") as file:
            file.write(f"{program.pid} {orphan}")
        os._exit(0)
    os.wait()
    if source[0].endswith("hangs"):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(10_000)
    return [1.0] * len(completions)


def _sockets():
    links = {
        int(each): os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if _is_open(each)
    }
    return [descriptor for descriptor, link in links.items() if link.startswith("socket:")]


def _is_open(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")

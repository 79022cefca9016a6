"""An engine of a user's own: a server samples over HTTP. This file is all of it."""

import dataclasses
import json
import urllib.request

import numpy as np

from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.engines.engine_kind import EngineKind
from dcmdp_jax.engines.machine import MemoryPart
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.fields import setting


@dataclasses.dataclass(frozen=True)
class Settings:
    server: str = setting("", "Address of the server.")
    buffer_mib: int = setting(8, "Memory for replies.", unit="MiB", minimum=1)


class StubEngine:
    def __init__(self, arguments):
        self._server = arguments.settings.server
        self._vocabulary = arguments.model.vocab_size

    def _ask(self, what, **fields):
        with urllib.request.urlopen(
            f"{self._server}/{what}", json.dumps(fields).encode(), timeout=60
        ) as reply:
            return json.load(reply)

    def sync_weights(self, params, policy_version):
        self._version = policy_version
        return self._ask(
            "weights", version=policy_version, scale=float(np.sum(params["norm"]["scale"]))
        )

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        version = self._version
        count = sampling.group_size
        for group, prompt in enumerate(prompts):
            row = [seed, step, first_prompt + group]
            sampled = self._ask("sample", row=row, count=count, vocabulary=self._vocabulary)
            arrays = [
                (np.array(ids, np.int32), np.array(logprobs, np.float32))
                for ids, logprobs in sampled
            ]
            yield [
                single_turn(
                    prompt,
                    ids,
                    logprobs,
                    policy_version=version,
                    group=group,
                    member=member,
                    finish_reason="length",
                )
                for member, (ids, logprobs) in enumerate(arrays)
            ]

    def score(self, prompts, completions, *, temperature):
        asked = [ids.tolist() for ids in completions]
        return [
            np.array(row, np.float32)
            for row in self._ask("score", rows=asked, vocabulary=self._vocabulary)
        ]

    release_weights = close = lambda self: None


class StubKind(EngineKind):
    name = "stub"
    settings = Settings
    precisions = ("float32",)

    def check(self, arguments):
        if not (server := arguments.settings.server).startswith("http://"):
            raise ArgumentError("server", f"got {server!r}, must be http://HOST:PORT")

    def memory(self, arguments, load, machine, rows):
        size = arguments.settings.buffer_mib * 2**20
        return [MemoryPart("stub's buffer", host=size, lower="`buffer_mib`")]

    def build(self, arguments):
        return StubEngine(arguments)


ENGINE = StubKind()

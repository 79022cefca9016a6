"""An engine in a process of its own, which samples while the trainer trains.

What it samples depends on the weights.

`python overlapping_engine.py` is that process: a line of JSON in, a line of JSON out. Killed, it is
started again and asked again.
"""

import json
import subprocess
import sys
import time
import zlib

import numpy as np

# So long takes a group, to be killed in.
_GROUP_S = 0.02


def _serve():
    for line in sys.stdin:
        asked = json.loads(line)
        time.sleep(asked.get("seconds", _GROUP_S))
        words = np.random.default_rng([asked["weights"], *asked["row"]])
        count = asked["count"]
        ids = words.integers(4, asked["vocabulary"], (count, 5))
        # Near an even choice, so that there is a discrepancy from a policy that knows nothing.
        logprobs = -np.log(asked["vocabulary"]) + words.normal(0, 0.1, (count, 5))
        print(json.dumps([ids.tolist(), logprobs.tolist()]), flush=True)


class OverlappingEngine:
    """Of the protocol in `engines.protocol`."""

    def __init__(self, arguments):
        self._vocabulary = arguments.model.vocab_size
        self._process = None
        self._version = -1

    def _ask(self, **fields):
        for _ in range(9):
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            try:
                self._process.stdin.write(json.dumps(fields) + "\n")
                self._process.stdin.flush()
                if answer := self._process.stdout.readline():
                    return json.loads(answer)
            except BrokenPipeError:
                pass
            self.close()
        raise AssertionError("it died nine times")

    def sync_weights(self, params, policy_version):
        import jax

        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        self._weights = zlib.crc32(b"".join(leaf.tobytes() for leaf in leaves))
        self._version = policy_version
        return {}

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        from dcmdp_jax.data.episode import single_turn

        version = self._version
        weights = self._weights
        for group, prompt in enumerate(prompts):
            ids, logprobs = self._ask(
                weights=weights,
                row=[seed, step, first_prompt + group],
                count=sampling.group_size,
                vocabulary=self._vocabulary,
            )
            completions = zip(np.array(ids, np.int32), np.array(logprobs, np.float32), strict=True)
            yield [
                single_turn(
                    prompt,
                    completion_ids,
                    completion_logprobs,
                    policy_version=version,
                    group=group,
                    member=member,
                    finish_reason="stop",
                )
                for member, (completion_ids, completion_logprobs) in enumerate(completions)
            ]

    def score(self, prompts, completions, *, temperature):
        return [np.full(len(ids), -np.log(self._vocabulary), np.float32) for ids in completions]

    def release_weights(self):
        pass

    def close(self):
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


if __name__ == "__main__":
    _serve()
else:
    from dcmdp_jax.engines.engine_kind import EngineKind

    class OverlappingKind(EngineKind):
        name = "overlapping"
        precisions = ("float32",)

        def build(self, arguments):
            return OverlappingEngine(arguments)

    ENGINE = OverlappingKind()

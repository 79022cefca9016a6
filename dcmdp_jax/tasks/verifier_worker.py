"""One verifier process: compares answers read from standard input, one JSON object a line, until the input ends.

    python -m dcmdp_jax.tasks.verifier_worker TIME_LIMIT_SECONDS

First line out: {"ready": true}, or {"fatal": "..."} when math-verify can't be imported. Then for each line
{"prediction": ..., "gold": ...} in, one {"equal": bool} or {"error": "..."} out. The process is the trainer's child and
must not outlive it: it ends when its input ends, and should nobody be left to kill it at the time limit, an alarm with
the default action does, even inside C code that never returns to Python. Its memory is capped.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

MEMORY_LIMIT_BYTES = 2 * 1024**3
_ALARM_GRACE_SECONDS = 2.0


def main(time_limit_seconds: float) -> None:
    """Serves comparisons until standard input ends.

    Args:
        time_limit_seconds: after this many seconds on one comparison, and some grace, the process ends itself.
    """
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not look like a reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to handle
    try:
        from dcmdp_jax.tasks.equivalence import equivalent

        equivalent("x+1", "1+x")  # loads sympy and the parser's tables
    except Exception as error:
        replies.write(json.dumps({"fatal": f"{type(error).__name__}: {error}"}) + "\n")
        return
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        task = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, time_limit_seconds + _ALARM_GRACE_SECONDS)
        try:
            reply: dict[str, object] = {"equal": equivalent(task["prediction"], task["gold"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:300]}
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""The program of the verifier's worker processes: compares answers by math-verify.

    python -m dcmdp_jax.rewards.math.verifier_worker [SOCKET_FD]

Without a socket it only loads what it needs, to show why it can't.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from dcmdp_jax.rewards.worker_process import serve


def load() -> Callable[[str, str], bool]:
    """Import the comparison and run it once, so that sympy and the parser's tables are loaded."""
    from dcmdp_jax.rewards.math.equivalence import equivalent

    equivalent("x+1", "1+x")
    return equivalent


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(int(sys.argv[1]), load)
    else:
        load()

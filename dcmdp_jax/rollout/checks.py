"""What must hold of a rollout before anything is learnt from it, whichever engine it came from."""

from __future__ import annotations

import numpy as np

from dcmdp_jax.rollout.engine import EngineError
from dcmdp_jax.types import Rollout


def unusable_completions(rollout: Rollout, *, drop: bool) -> np.ndarray:
    """[N] bool: completions with a log-prob that is NaN, infinite or above 0 by more than rounding.

    Args:
        rollout: what the engine returned.
        drop: return them to be left out and counted; otherwise any is an error.

    Raises:
        EngineError: naming the first such completion, token and value, unless `drop`; or if all are unusable.
    """
    unusable = np.zeros(len(rollout.completion_ids), bool)
    for i, logprobs in enumerate(rollout.rollout_logprobs):
        wrong = ~np.isfinite(logprobs) | (logprobs > 1e-3)
        if not wrong.any():
            continue
        if not drop:
            t = int(np.argmax(wrong))
            raise EngineError(
                f"rollout: log-prob of token {t} (id {rollout.completion_ids[i][t]}) of completion {i} is "
                f"{logprobs[t]}; the engine's numbers are broken, or set rollout.on_non_finite=drop to leave it out"
            )
        unusable[i] = True
    if unusable.all():
        raise EngineError("rollout: no completion has usable log-probs; the engine's numbers are broken")
    return unusable

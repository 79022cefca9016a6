"""Remedies of your own: a penalty with a parameter, and prime-rl's loss of before September 2026.

    dcmdp train --config=configs/demo.py \
        "--config.algorithm.method=examples/remedies.py:huber(knee=0.01)"
    dcmdp train --config=configs/demo.py:grpo --config.algorithm.ratio_denominator=rollout \
        "--config.algorithm.loss=examples/remedies.py:prime_rl(kl_tau=1e-3)"

A remedy is a pure function of the tokens of a micro-batch, compiled into the training step. The
metrics have its statistics as `remedy/NAME/STATISTIC`. docs/remedies.md says what it gets and
returns.
"""

import jax
import jax.numpy as jnp

from dcmdp_jax.algorithm.masked import masked_sum
from dcmdp_jax.algorithm.remedies import Statistics, Tokens


def huber(tokens: Tokens, *, knee: float = 0.01) -> tuple[jax.Array, Statistics]:
    """A - lambda h(delta); h = delta^2 / (2 knee) up to the knee, delta - knee / 2 above."""
    delta = tokens.discrepancy
    above = tokens.discrepancy > knee
    penalty = jnp.where(above, delta - knee / 2, delta**2 / (2 * knee))
    return tokens.advantages - tokens.multiplier * penalty, {
        "above_knee": masked_sum(above, tokens.completion_mask)
    }


def prime_rl(
    tokens: Tokens, *, low: float = 0.2, high: float = 0.2, kl_tau: float = 1e-3
) -> tuple[jax.Array, Statistics]:
    """prime-rl's loss until 2026-08-27: DPPO's mask, and kl_tau (log pi - log q)^2."""
    shift = jnp.exp(tokens.train_logprobs) - jnp.exp(tokens.rollout_logprobs)
    masked = jnp.where(tokens.advantages > 0, shift > high, shift < -low)
    log_ratio = tokens.train_logprobs - tokens.rollout_logprobs
    kl = log_ratio**2
    losses = kl_tau * kl - jnp.where(masked, 0.0, jnp.exp(log_ratio) * tokens.advantages)
    return losses, {
        "masked": masked_sum(masked, tokens.completion_mask),
        "kl": masked_sum(kl, tokens.completion_mask),
    }

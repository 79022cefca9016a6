"""Trust regions bound an update of the policy: remedies (`remedies`) from tokens to `Region`.

gamma is the importance ratio of the token, pi the policy now, mu the one in gamma's denominator:
the training stack's that made the batch, or the engine's (`algorithm.ratio_denominator`). To add
one, write it in a file of yours, or here and name it in `TRUST_REGIONS`.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Bool, Float

from dcmdp_jax.algorithm.masked import completion_sums, gather_to_tokens, masked_sum
from dcmdp_jax.algorithm.remedies import Function, Region, Tokens, require_tokens
from dcmdp_jax.algorithm.require import require_number, require_same_shape, require_sizes
from dcmdp_jax.algorithm.stats import (
    MAX_LOG_RATIO,
    Statistic,
    as_float,
    binary_kl,
    clamped_log_ratio,
    log_difference,
)
from dcmdp_jax.types import Array, Scalar

CLIP_LOW = 0.2
"""eps_low, ours: the paper states none."""
CLIP_HIGH = 0.24
"""eps_high of the paper's runs [6.1]."""


def clipped_surrogate(
    ratio: Float[Array, "*s"],
    advantages: Float[Array, "*s"],
    *,
    clip_low: Scalar = CLIP_LOW,
    clip_high: Scalar = CLIP_HIGH,
) -> Region:
    """The clipped objective of each token, to be maximized (Eq. 9-10; Eq. 1 and 4 by their own A).

        min(gamma A, clip(gamma, 1 - clip_low, 1 + clip_high) A)

    The gradient in log pi_theta is gamma A where the clip does not bite and 0 strictly beyond a
    bound. At gamma equal to a bound it is that of the unclipped side, so that with a clip of 0 the
    first update on a batch, where gamma = 1, is the plain policy gradient. The loss of a batch is
    the negated mean over completions of their means over tokens.

    Args:
        ratio: gamma (`importance_ratio`). The gradient flows here alone.
        advantages: penalized (`penalized_advantages`) or not. A constant.
        clip_low: eps_low in [0, 1).
        clip_high: eps_high >= 0.

    Returns:
        `Region`: `objective`, in the dtype of the inputs, and bool `low` and `high`, the tokens
            where a bound bites.

    Raises:
        ValueError: if the shapes differ or a clip is outside its range.
    """
    require_same_shape(ratio=ratio, advantages=advantages)
    require_number("clip_low", clip_low, minimum=0, maximum=1, open_maximum=True)
    require_number("clip_high", clip_high, minimum=0)
    ratio = as_float(ratio)
    advantages = stop_gradient(as_float(advantages))
    # The minimum of Eq. 9 as a choice: autodiff splits the gradient of min() and clip() where their
    # arguments tie.
    low = (advantages < 0) & (ratio < 1.0 - clip_low)
    high = (advantages > 0) & (ratio > 1.0 + clip_high)
    bound = jnp.where(low, 1.0 - clip_low, 1.0 + clip_high)
    return Region(jnp.where(low | high, bound, ratio) * advantages, low, high)


def clip(
    tokens: Tokens,
    *,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
    dual: float = 0.0,
) -> Region | tuple[Region, dict[str, Statistic]]:
    """PPO's pessimistic clip: `clipped_surrogate` as a trust region.

    `dual` c > 1 (Ye et al. 2020; 0 is off): where A < 0 and gamma > c the objective is c A, without
    gradient; `policy/dual_clip_fraction` is the share of these tokens. verl (`clip_ratio_c`, 3 by
    default), NeMo-RL (`ratio_clip_c`), slime (`eps_clip_c`), AReaL (`c_clip`), Tunix (`epsilon_c`)
    and TRL (`delta`) do the same; off by default in all but verl.
    """
    require_number("low", low, minimum=0, maximum=1, open_maximum=True)
    _require(tokens, high=high)
    region = clipped_surrogate(tokens.ratio, tokens.advantages, clip_low=low, clip_high=high)
    if dual == 0:
        return region
    require_number("dual", dual, minimum=1, open_minimum=True)
    capped = (tokens.advantages < 0) & (tokens.ratio > dual)
    objective = jnp.where(capped, dual * tokens.advantages, region.objective)
    capped_share = masked_sum(capped, tokens.completion_mask)
    return region._replace(objective=objective), {"policy/dual_clip_fraction": capped_share}


def dppo_tv(tokens: Tokens, *, low: float = 0.2, high: float = 0.2) -> Region:
    """DPPO's binary total variation: gamma A while |pi - mu| is within bounds (arXiv:2602.04879).

        stopped:  A > 0 and pi - mu > high,  or  A < 0 and pi - mu < -low,  in probability, 0 to 1

    A stopped token has objective 0 and counts in the denominator. mu is the policy in the ratio's
    denominator: the paper's is the engine's (`ratio_denominator="rollout"`). prime-rl
    (`dppo_mask_low`, `dppo_mask_high`, 0.2) has the same and adds 1e-3 log(gamma)^2
    (`examples/remedies.py`). verl: `dppo_tv`.
    """
    _require(tokens, low=low, high=high)
    shift = jnp.exp(_policy(tokens)) - jnp.exp(tokens.anchor_logprobs)
    falls = (tokens.advantages < 0) & (shift < -low)
    rises = (tokens.advantages > 0) & (shift > high)
    return _masked(tokens, falls, rises)


def dppo_kl(tokens: Tokens, *, low: float = 0.05, high: float = 0.05) -> Region:
    """DPPO's binary KL: gamma A while KL(Bernoulli(mu) || Bernoulli(pi)) is within bounds, in nats.

        D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))
        stopped:   A > 0, pi > mu and D > high,   or   A < 0, pi < mu and D > low

    pi and mu are held below 1 - 1e-6 in D. Otherwise as `dppo_tv`. verl: `dppo_kl`.
    """
    _require(tokens, low=low, high=high)
    policy = _policy(tokens)
    anchor = tokens.anchor_logprobs
    advantages = tokens.advantages
    divergence = binary_kl(anchor, policy)
    falls = (advantages < 0) & (policy < anchor) & (divergence > low)
    rises = (advantages > 0) & (policy > anchor) & (divergence > high)
    return _masked(tokens, falls, rises)


def drpo(tokens: Tokens, *, low: float = 0.2, high: float = 0.2) -> Region:
    """DRPO, the smooth form of `dppo_tv` (Yao et al. 2026, arXiv:2606.09821).

        gamma A - |A| / (2 c) mu (gamma - 1)^2,    c = high where A > 0, low where A < 0

    Its gradient is gamma A (1 - sign(A) (pi - mu) / c): at |pi - mu| = c it is 0, as where
    `dppo_tv` begins to stop it, and beyond it leads back. Nothing is stopped. The paper has one c
    for both signs.
    """
    _require(tokens, open_minimum=True, low=low, high=high)
    ratio = tokens.ratio
    advantages = tokens.advantages
    bound = jnp.where(advantages > 0, high, low)
    quadratic = jnp.exp(tokens.anchor_logprobs) * (ratio - 1.0) ** 2
    return Region(ratio * advantages - jnp.abs(advantages) / (2.0 * bound) * quadratic)


def ipo(tokens: Tokens, *, high: float = 0.3, cap: float = 1e4) -> Region:
    """IPO: min(gamma, cap) A while |pi - mu| <= high, whatever the sign of A.

    prime-rl's default since 2026-08-27. The cap takes nothing from the gradient's direction: above
    it the gradient in log pi is cap A. A stopped token has objective 0 and counts. prime-rl (PR
    #3418; `eps` 0.3, `max_importance_ratio` 1e4, no KL term; read at the configuration of
    2026-09-18) with `ratio_denominator="rollout"`.
    """
    _require(tokens, high=high)
    require_number("cap", cap, minimum=1)
    shift = jnp.exp(_policy(tokens)) - jnp.exp(tokens.anchor_logprobs)
    # ratio / stop_gradient(ratio) is 1 with the gradient of log gamma.
    scale = stop_gradient(jnp.minimum(tokens.ratio, cap) / tokens.ratio)
    return _masked(tokens._replace(ratio=tokens.ratio * scale), shift < -high, shift > high)


def cispo(tokens: Tokens, *, low: float = 0.0, high: float = 5.0) -> Region:
    """CISPO (MiniMax-M1, arXiv:2506.13585): sg(clip(gamma, low, high)) A log pi.

    No token loses its gradient. Bounds of gamma itself. TRL (`loss_type=cispo`, `epsilon_high`, 5
    after ScaleRL) has no lower one; verl (`loss_mode=cispo`) has 1 - 0.2 and 1 + 0.2; prime-rl and
    open-instruct have it too.
    """
    _require(tokens, low=low)
    require_number("high", high, minimum=low)
    return _weighed(tokens, jnp.clip(tokens.ratio, low, high))


def sapo(
    tokens: Tokens,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Region:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): A 4 / tau sigmoid(tau (gamma - 1)).

    A smooth gate in place of the clip. tau is `tau_positive` where A > 0. Its slope in gamma is A
    at gamma = 1 and falls on both sides. TRL (`sapo_temperature_pos`, `_neg`), verl (`tau_pos`,
    `tau_neg`), AReaL (`sapo_tau_pos`, `_neg`): 1 and 1.05 in all.
    """
    _require(tokens, open_minimum=True, tau_positive=tau_positive, tau_negative=tau_negative)
    tau = jnp.where(tokens.advantages > 0, tau_positive, tau_negative)
    return Region(tokens.advantages * jax.nn.sigmoid(tau * (tokens.ratio - 1.0)) * 4.0 / tau)


def vespo(
    tokens: Tokens,
    *,
    k_positive: float = 2.0,
    decay_positive: float = 3.0,
    k_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Region:
    """VESPO (arXiv:2602.10693): sg(phi(w)) A log pi with phi(w) = w^k e^(decay (1 - w)).

    w is the completion's prod gamma. phi(1) = 1; it is largest at w = k / decay. k and decay are
    the positive ones where A >= 0. log w is clamped to [log 1e-8, 20]. Tokens that a correction
    drops are not in the product. TRL (`loss_type=vespo`, `vespo_k_pos` 2, `vespo_lambda_pos` 3,
    `_neg` 3 and 2) and the authors' code alike; their w has the engine's probabilities below:
    `ratio_denominator="rollout"`.
    """
    _require(
        tokens,
        k_positive=k_positive,
        decay_positive=decay_positive,
        k_negative=k_negative,
        decay_negative=decay_negative,
    )
    sums = completion_sums(log_difference(_policy(tokens), tokens.anchor_logprobs), tokens.where)
    log_w = jnp.clip(gather_to_tokens(sums, tokens.completion_index), math.log(1e-8), MAX_LOG_RATIO)
    up = tokens.advantages >= 0
    k = jnp.where(up, k_positive, k_negative)
    decay = jnp.where(up, decay_positive, decay_negative)
    return _weighed(tokens, jnp.exp(k * log_w + decay * (1.0 - jnp.exp(log_w))))


def acr(
    tokens: Tokens,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 2.0,
) -> Region:
    """QuRL's adaptive clipping range (arXiv:2602.13953): PPO's clip with another upper bound.

        min(gamma A, clip(gamma, 1 - low, (1 + high) / min(p / q, cap)) A)

    so that pi / q, what the engine sampled from, is held at 1 + high. The paper's objective is this
    times min(p / q, C): `corrections="tis(high=C)"`. gamma's denominator is p
    (`ratio_denominator="train"`).
    """
    require_number("low", low, minimum=0, maximum=1, open_maximum=True)
    _require(tokens, high=high)
    require_number("cap", cap, minimum=0, open_minimum=True)
    ratio = tokens.ratio
    advantages = tokens.advantages
    mismatch = jnp.exp(clamped_log_ratio(tokens.old_logprobs, tokens.rollout_logprobs))
    upper = (1.0 + high) / jnp.minimum(mismatch, cap)
    lower = jnp.minimum(1.0 - low, upper)
    falls = (advantages < 0) & (ratio < lower)
    rises = (advantages > 0) & (ratio > upper)
    clipped = jnp.where(falls, lower, jnp.where(rises, upper, ratio))
    return Region(clipped * advantages, falls, rises)


def _require(
    tokens: Tokens,
    *,
    open_minimum: bool = False,
    **sizes: float,
) -> None:
    """Raise unless the arrays have one shape and the parameters are at least 0, or above it."""
    require_tokens(tokens)
    require_sizes(open_minimum=open_minimum, **sizes)


def _policy(tokens: Tokens) -> Float[jax.Array, "R L"]:
    """log pi now, where a bound looks at it: a constant."""
    return stop_gradient(tokens.train_logprobs)


def _masked(
    tokens: Tokens,
    low: Bool[Array, "R L"],
    high: Bool[Array, "R L"],
) -> Region:
    return Region(jnp.where(low | high, 0.0, tokens.ratio * tokens.advantages), low, high)


def _weighed(tokens: Tokens, weights: Float[Array, "R L"]) -> Region:
    """sg(weight) A log pi: the policy gradient with these weights, which are constants."""
    return Region(stop_gradient(weights) * tokens.advantages * tokens.train_logprobs)


_OURS = clip, dppo_tv, dppo_kl, drpo, ipo, cispo, sapo, vespo, acr
TRUST_REGIONS: Mapping[str, Function] = {region.__name__: region for region in _OURS}
"""Name -> trust region, a remedy (`remedies`): from the tokens to `Region`."""

"""Score centering: the expected score of a token, subtracted (Marek and Ryabinin 2026, arXiv:2609.20807)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dcmdp_jax.algorithm.corrections import Correction, chain
from dcmdp_jax.algorithm.discrepancy import Level
from dcmdp_jax.algorithm.distribution import Head, require_head, with_tail
from dcmdp_jax.algorithm.losses import importance_ratio, sequence_log_ratio
from dcmdp_jax.algorithm.masked import weighted_sum
from dcmdp_jax.algorithm.remedies import Corrected, Function, Tokens, require_tokens, split
from dcmdp_jax.algorithm.require import require_same_shape
from dcmdp_jax.types import Array


def score_centering(tokens: Tokens) -> Corrected:
    """The name in `algorithm.corrections`: it weighs and drops nothing; the loss has a term more (`centering_loss`)."""
    require_tokens(tokens)
    return Corrected(jnp.ones(jnp.shape(tokens.completion_mask)), jnp.ones_like(tokens.completion_mask))


def centering_loss(
    tokens: Tokens,
    weights: Float[Array, "R L"],
    head: Head,
    *,
    anchor: str = "old_logprobs",
    loss: Function,
    corrections: Sequence[Correction] = (),
    ratio_level: Level = "token",
) -> Float[jax.Array, ""]:
    """Baseline of score centering, sum_t w_t E_q[f l]: the loss that the engine's other tokens would have.

    Where p and q differ, E_q[A f(r) s] of the score s = grad log p has a part E_q[A] E_q[f(r) s] that teaches the
    trainer the bias of its own engine. Subtracting A E_q[f(r) s] leaves the covariance of A and f(r) s. With the
    plain surrogate, gamma = 1 and the engine's k likeliest tokens H, the gradient of the loss is

        -A (f(r_y) grad log p_y - sum_H (q f(p / q) - alpha p) grad log p),    alpha = rho f(1 / rho),
        rho = (1 - q_H) / (1 - p_H),

    in which the tail counts as if q were rho p there. That is one token of log-probs log(1 - p_H) and log(1 - q_H): its
    score is -sum_H p grad log p / (1 - p_H). So the expectation is over the k tokens of H and the tail as one more,
    and holds for every loss: l_j is the loss at that token less what it is with A = 0 (a term without the advantage, as
    the square of the log-ratio, is not centred), its gradient in log p_j; q_j f_j is a constant. A is that of the
    sampled token in all of them, its charge included. With q = p, f = 1 and H the vocabulary the expectation is 0 in
    gradient.

    Args:
        tokens: [R, L] as `losses.policy_loss` gets them.
        weights: float32 >= 0, of the tokens in the loss, corrections that weigh single tokens not in it: w.
        head: the engine's likeliest tokens.
        anchor: field of `Head` whose policy is in the ratio's denominator.
        loss: function from tokens to losses, as in `policy_loss`.
        corrections: corrections that weigh or drop single tokens, f.
        ratio_level: "sequence": each token's ratio is its completion's in value.

    Returns:
        To be subtracted from the sum of the loss. Through it the gradient reaches `head.train_logprobs`.

    Raises:
        ValueError: if the shapes of tokens, weights or head differ.
    """
    require_tokens(tokens)
    require_same_shape(weights=weights, completion_mask=tokens.completion_mask)
    require_head(head, tokens.completion_mask)
    active = jnp.asarray(tokens.completion_mask, bool) & (jnp.asarray(weights) != 0)
    arrays = {name: x for name, x in tokens._asdict().items() if x is not None and jnp.ndim(x) == active.ndim}
    inside = {name: jax.lax.stop_gradient(jnp.where(active, x, 0)) for name, x in arrays.items()}
    whole = None
    if ratio_level == "sequence":
        log_ratio = sequence_log_ratio(tokens.train_logprobs, tokens.anchor_logprobs, tokens.where)
        whole = jnp.exp(jnp.where(active, log_ratio, 0.0))
    seen = tokens._replace(**inside)._replace(completion_mask=active)

    def at(present: Array, train: Array, old: Array, start: Array, rollout: Array, anchored: Array) -> jax.Array:
        """q_j f_j l_j of one token in each place, [R, L]."""
        there = seen._replace(train_logprobs=train, old_logprobs=old, start_logprobs=start, rollout_logprobs=rollout)
        there = there._replace(anchor_logprobs=anchored, ratio=importance_ratio(train, anchored))
        if whole is not None:
            there = there._replace(ratio=jax.lax.stop_gradient(whole) * jnp.exp(train - jax.lax.stop_gradient(train)))
        mass = jnp.where(present, jnp.exp(rollout), 0.0)
        if corrections:
            corrected = chain(there, corrections)[0]
            mass = mass * jnp.where(corrected.keep, corrected.weights, 0.0)
        without = there._replace(advantages=jnp.zeros_like(there.advantages))
        return jax.lax.stop_gradient(mass) * (split(loss(there))[0] - split(loss(without))[0])

    present = head.present & active[..., None]

    def outcomes(values: Float[Array, "R L k"]) -> Float[jax.Array, "k+1 R L"]:
        """The head and the tail."""
        return jnp.moveaxis(jnp.where(active[..., None], with_tail(values, present), 0.0), -1, 0)

    names = "train_logprobs", "old_logprobs", "start_logprobs", "rollout_logprobs", anchor
    there = jnp.concatenate([present, active[..., None]], axis=-1)
    expected = jax.vmap(at)(jnp.moveaxis(there, -1, 0), *(outcomes(getattr(head, name)) for name in names))
    return weighted_sum(jnp.sum(expected, axis=0), jax.lax.stop_gradient(jnp.where(active, weights, 0.0))).total

"""The surrogate on arrays of its own."""

import functools

from dcmdp_jax.algorithm import losses
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS


def policy_surrogate(
    train,
    old,
    advantages,
    mask,
    weights,
    *,
    clip_low=0.2,
    clip_high=0.24,
    trust_region="clip",
    sequence=None,
    **dual,
):
    """The surrogate with sizes of its trust region; `sequence` is (completion index, number of
    completions).
    """
    index, count = sequence or (None, 0)
    tokens = Tokens(
        train_logprobs=train,
        anchor_logprobs=old,
        advantages=advantages,
        completion_mask=mask,
        completion_index=index,
        num_completions=count,
    )
    region = functools.partial(TRUST_REGIONS[trust_region], low=clip_low, high=clip_high, **dual)
    loss = functools.partial(losses.surrogate, trust_region=region)
    level = "sequence" if sequence else "token"
    total, statistics = losses.policy_loss(tokens, weights, loss=loss, ratio_level=level)
    return total, {name.removeprefix("policy/"): value for name, value in statistics.items()}

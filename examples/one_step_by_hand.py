"""One step of DC-GRPO by the functions of `dcmdp_jax.algorithm`, each value beside its arithmetic.

    python examples/one_step_by_hand.py

Two prompts with two completions each. The engines disagree on the third token of the first
completion.
"""

import jax
import numpy as np

from dcmdp_jax.algorithm import advantages, discrepancy, dual, losses, masked, penalties, stats
from dcmdp_jax.algorithm.remedies import Tokens

mask = np.array(
    [[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]], bool
)  # 4 completions of 3, 2, 3 and 1 tokens
old = np.log(np.full((4, 3), 0.5))  # p^Train, weights that made the batch
rollout = old.copy()
rollout[0, 2] = np.log(0.3)  # p^Inf
rewards, groups, valid = np.array([1.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1]), np.ones(4, bool)
index = np.indices(mask.shape)[0]  # row i holds completion i; packed rows have one of their own

delta = discrepancy.token_discrepancy(old, rollout, completion_mask=mask)
advantage = masked.gather_to_tokens(advantages.group_advantages(rewards, groups, valid), index)
tokens = Tokens(advantages=advantage, discrepancy=delta, completion_mask=mask, multiplier=0.1)
tokens = tokens._replace(advantages=penalties.dc_grpo(tokens), anchor_logprobs=old)
weights, total = losses.aggregation_weights(mask.sum(axis=1), valid, mode="seq_mean_token_mean")


def loss(train):
    token_weights = masked.gather_to_tokens(weights, index)
    summed, clipped = losses.policy_loss(
        tokens._replace(train_logprobs=train), token_weights
    )  # clip(0.2, 0.24)
    return summed._replace(weight=total).value(), stats.values(clipped)


(value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(old)
mean_delta = masked.masked_sum(delta, mask).value()
multiplier = dual.dual_update(0.1, mean_delta, tolerance=0.0037)

# Of the first completion: the third token pays 0.1 * 0.2, and the gradient is
# -A / (3 tokens * 4 completions).
print("A - lambda delta:", tokens.advantages[0])  # [0.70710576 0.70710576 0.6871058]
print("gradient x 12:", gradient[0] * 12)  # [-0.70710576 -0.70710576 -0.6871058]
# Zero: rewards of the second prompt are equal, its engines agree.
print("gradient of the second prompt:", gradient[2:])
print("mean |p - q|:", mean_delta)  # 0.02222222 = 0.2 / 9 tokens
print("next lambda:", multiplier)  # 0.11852223 = 0.1 + (0.0222 - 0.0037)

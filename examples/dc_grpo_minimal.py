"""DC-GRPO on one page: Algorithm 1 in the open; a tiny model, a sampler that rounds its weights.

    python examples/dc_grpo_minimal.py

The policy learns to repeat three symbols and then to stop. One engine trains, in float32. Another
samples, with the same weights rounded to 4 bits, so that the probabilities of the two differ on
every token: the discrepancy that DC-GRPO (Liu et al., "Reformulate LLM Reinforcement Learning for
Efficient Training under Black-box Discrepancy") penalizes. It takes less than a minute on a CPU.
The reward goes from about 0.2 to 1 in 50 steps. lambda rises while the mean of |p - q| is above c,
and falls after. That mean falls as the policy becomes sure of its tokens, with or without a
penalty: where p and q are near 1 there is little to differ in.

Nothing of dcmdp_jax is used. There the functions of this page are `dcmdp_jax.token_discrepancy`,
`group_advantages`, `penalized_advantages`, `clipped_surrogate`, `dual_update` and, all in one call,
`dc_grpo_loss` (docs/losses.md); a test holds this page against its training step. Equation numbers
count the displayed equations of the paper.
"""

import sys
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

SYMBOLS = 6  # ids 0 .. 5
END = 6  # the id that ends a completion
PROMPT = 3  # tokens of a prompt
LIMIT = 6  # tokens of a completion at most
PROMPTS = 16  # B of the paper
GROUP = 16  # G of the paper
MINI_BATCHES = 2  # updates of the policy in a step
CLIP_LOW = 0.2
CLIP_HIGH = 0.24
MULTIPLIER = 0.1  # lambda_0
TOLERANCE = 0.01  # c
DUAL_RATE = 1.0  # eta
STEPS = 100
LEARNING_RATE = 3e-3


class Policy(nn.Module):
    """One layer of attention over the tokens so far; logits of the next, [N, L, SYMBOLS + 1]."""

    width: int = 64

    @nn.compact
    def __call__(self, tokens):
        positions = self.param(
            "positions", nn.initializers.normal(0.3), (PROMPT + LIMIT, self.width)
        )
        x = nn.Embed(SYMBOLS + 1, self.width)(tokens) + positions[: tokens.shape[1]]
        attention = nn.MultiHeadDotProductAttention(num_heads=4, use_bias=False)
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(tokens))
        x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.RMSNorm()(x))))
        return nn.Dense(SYMBOLS + 1)(nn.RMSNorm()(x))


class Batch(NamedTuple):
    """N completions; groups are GROUP rows that follow each other."""

    tokens: jax.Array  # [N, PROMPT + LIMIT], prompt and completion
    mask: jax.Array  # [N, LIMIT], 1 on sampled tokens, END included
    rollout: jax.Array  # [N, LIMIT], log p^Inf
    old: jax.Array  # [N, LIMIT], log p^Train
    advantages: jax.Array  # [N]


policy = Policy()
optimizer = optax.adam(LEARNING_RATE)


def logprobs(params, tokens):
    """log pi of each completion token, [N, LIMIT]."""
    table = nn.log_softmax(policy.apply(params, tokens)[:, PROMPT - 1 : -1])
    return jnp.take_along_axis(table, tokens[:, PROMPT:, None], axis=-1)[..., 0]


# The inference engine: the same weights, rounded.


def rounded(params, levels=7):
    """Round each weight to one of 15 multiples of the matrix's largest over 7: 4 bits."""

    def nearest(weight):
        step = jnp.max(jnp.abs(weight)) / levels
        return jnp.round(weight / step) * step if weight.ndim > 1 else weight

    return jax.tree.map(nearest, params)


@jax.jit
def sample(params, prompts, key):
    """Tokens [N, PROMPT + LIMIT], mask and log p^Inf [N, LIMIT], as the engine sampled them."""
    tokens = jnp.pad(prompts, ((0, 0), (0, LIMIT)), constant_values=END)
    alive = jnp.ones(len(prompts), bool)
    mask = []
    rollout = []
    for t, step_key in enumerate(jax.random.split(key, LIMIT)):
        table = nn.log_softmax(policy.apply(params, tokens)[:, PROMPT + t - 1])
        token = jnp.where(alive, jax.random.categorical(step_key, table), END)
        tokens = tokens.at[:, PROMPT + t].set(token)
        rollout.append(jnp.where(alive, jnp.take_along_axis(table, token[:, None], 1)[:, 0], 0.0))
        mask.append(alive)
        alive &= token != END
    return tokens, jnp.stack(mask, 1).astype(jnp.float32), jnp.stack(rollout, 1)


def verify(tokens):
    """Share of the four right tokens (the prompt's and END) that are in their places: [N]."""
    answer = np.concatenate([tokens[:, :PROMPT], np.full((len(tokens), 1), END)], axis=1)
    return (tokens[:, PROMPT : 2 * PROMPT + 1] == answer).mean(axis=1).astype(np.float32)


# DC-GRPO.


def discrepancy(old, rollout, mask):
    """delta_{i,t} = |p^Train - p^Inf|, Eq. 3."""
    return jnp.abs(jnp.exp(old) - jnp.exp(rollout)) * mask


def group_advantage(rewards):
    """A_i = (r_i - mean) / std within the group, Eq. 8; 0 where all its rewards are equal."""
    groups = rewards.reshape(-1, GROUP)
    centered = groups - groups.mean(axis=1, keepdims=True)
    return (centered / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6)).reshape(-1)


def loss(params, batch, multiplier):
    """The negated objective, Eq. 9-10, of one mini-batch."""
    delta = discrepancy(batch.old, batch.rollout, batch.mask)
    penalized = batch.advantages[:, None] - multiplier * delta  # Eq. 8
    gamma = jnp.exp(logprobs(params, batch.tokens) - batch.old)
    clipped = jnp.clip(gamma, 1 - CLIP_LOW, 1 + CLIP_HIGH)
    objective = jnp.minimum(gamma * penalized, clipped * penalized) * batch.mask
    return -jnp.mean(objective.sum(axis=1) / batch.mask.sum(axis=1))


@jax.jit
def update(params, opt_state, batch, multiplier):
    """One step of the policy."""
    value, gradient = jax.value_and_grad(loss)(params, batch, multiplier)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def dual_ascent(multiplier, mean_discrepancy):
    """lambda_{k+1} = clip(lambda_k + eta (mean delta - c), 0, 1), Eq. 11."""
    return np.clip(multiplier + DUAL_RATE * (mean_discrepancy - TOLERANCE), 0.0, 1.0)


def train_step(params, opt_state, multiplier, tokens, mask, rollout, rewards):
    """Algorithm 1 after sampling and rewards; also returns the mean discrepancy and the losses."""
    old = jax.jit(logprobs)(params, tokens)  # p^Train, before any update: a constant
    batch = Batch(tokens, mask, rollout, old, group_advantage(rewards))
    losses = []
    for rows in np.split(np.arange(len(tokens)), MINI_BATCHES):  # primal: the policy
        mini = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        params, opt_state, value = update(params, opt_state, mini, multiplier)
        losses.append(float(value))
    mean = float(
        discrepancy(old, rollout, mask).sum() / mask.sum()
    )  # over the tokens of the whole batch
    return params, opt_state, dual_ascent(multiplier, mean), mean, losses  # dual: the multiplier


def main(steps=STEPS, seed=0):
    """Train, print every 10 steps, and return (reward, mean discrepancy, multiplier) of each."""
    rng = np.random.default_rng(seed)
    key = jax.random.key(seed)
    params = policy.init(key, jnp.zeros((1, PROMPT + LIMIT), jnp.int32))
    opt_state = optimizer.init(params)
    multiplier = MULTIPLIER
    history = []
    print(
        f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters; the sampler has them in 4 "
        f"bits, c = {TOLERANCE}"
    )
    for step in range(steps):
        prompts = np.repeat(rng.integers(0, SYMBOLS, (PROMPTS, PROMPT)), GROUP, axis=0)
        tokens, mask, rollout = sample(rounded(params), prompts, jax.random.fold_in(key, step))
        rewards = verify(np.asarray(tokens))
        before = multiplier
        params, opt_state, multiplier, mean, _ = train_step(
            params, opt_state, multiplier, tokens, mask, rollout, rewards
        )
        history.append((float(rewards.mean()), mean, float(before)))
        if step % 10 == 0 or step == steps - 1:
            print(
                f"step {step:3d}   reward {rewards.mean():.3f}   mean |p - q| {mean:.4f}   lambda "
                f"{before:.4f}"
            )
    wrote = [
        " ".join(map(str, row[PROMPT : PROMPT + int(n)]))
        for row, n in zip(tokens, mask.sum(axis=1), strict=True)
    ]
    print("the last step's first completions (6 ends one):")
    for prompt, text in list(zip(prompts, wrote, strict=True))[::GROUP][:5]:
        print(f"  {' '.join(map(str, prompt))} -> {text}")
    return history


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

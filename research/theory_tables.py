"""The tables behind docs/theory.md: the direction of the token's penalty, two steps with a way out,
budgets.

    python -m research theory          # writes tables/theory.txt

**Does the token's penalty descend the discrepancy? One state, every action, exact sums and
derivatives in float64.**

Logits z, trainer p = softmax(z), engine q, delta_a = |p_a - q_a|. What the discrepancy is, and
where it falls fastest:

    D = sum_a q_a delta_a = E_{a~q}[delta_a]

The penalty moves z by its expected score-function term over the engine's samples, delta being a
constant:

    v = E_{a~q}[-delta_a grad_z log p_a] = -(q delta - (sum_b q_b delta_b) p)
      = -sum_a (q_a / p_a) delta_a grad_z p_a

v is the gradient of -sum_a [q_a delta_a] log p_a with the bracket held, and not that of -D: it
leaves out what delta_a itself does as p moves, and weighs by q / p what the policy does. (Over
several tokens it leaves out, too, what a token does to the discrepancy of those after it; see
`way_out`.) Along a direction u of the logits

    dp = p (u - <p, u>),  dq = 0 (the engine stays) or q (u - <q, u>) (its logits stay z + a
                          constant)
    dD = sum_a dq_a delta_a + q_a sign(p_a - q_a) (dp_a - dq_a)

Two actions, the engine stays: delta_1 = delta_2 = |y - x| with y = p_1 and x = q_1, v_1 - v_2 = -2
delta (x - y), and y moves by y (1 - y) (v_1 - v_2), away from x, whatever x and y: D never falls.

**Two steps with a way around the mismatch: which penalty makes a policy take it, in closed form and
by simulation.**

The first token chooses a way, clean (logit theta) or noisy (0); the second has two actions, equally
right. On the clean way the engine computes as the trainer does. On the noisy way the trainer's
logits are (phi, 0) and the engine's (phi + d, 0). The noisy way earns 1, the clean one 1 - g: g is
the price of the way out. With

    x = sigma(theta),    y = sigma(phi),    z = sigma(phi + d),    delta = |y - z|,

both actions of the noisy way have the same discrepancy delta, and the first token has none. A step
samples groups of G completions of the ENGINE's policy and moves by gradient ascent of the mean over
completions of

    1/2 sum_t A_{i,t} log pi(a_{i,t} | s_{i,t}),  A of a penalty as in `PENALTIES`, not divided by a
                                                  deviation

(`reward_std` divides). Its expectation, for one unit of step size:

    E[d theta] = 1/2 x (1 - x) u,    E[d phi] = 1/2 (1 - x) (z - y) v,    with b = 1 - 1/G and

    penalty           u                          v
    grpo             -b g                       b x g
    token            -b g                       b x g - lambda delta
    sequence         -b g + lambda delta / 2    b x g - lambda delta / 2
    reward           b (lambda delta / 2 - g)   -b x (lambda delta / 2 - g)
    state            -b g                       b x g

`token` never moves theta: what is penalized after a choice reaches the choice only by the
completion's advantage. `token` and `sequence` push phi away from what the engine samples, since a
negative advantage on samples of z lowers y where z is above it: a penalty that is equal for all
actions has expected gradient 0 only if they are sampled from the policy. While delta stays as it
is, theta follows

    theta + sinh theta = theta_0 + sinh theta_0 + u s / 4    after steps of summed size s.

**Which budget can be met by growing sure?** The same two ways, but only the first action of the
noisy way is right, so that it earns 1 or 0: reward alone leads there and makes phi grow. Both
actions have |eps| = |logit y - logit z| = d whatever phi is, and delta = |y - z| -> 0. Each
completion is penalized its mean (`sequence`), its tokens being the first, which has no discrepancy,
and the second. With V = x (1 - g) + (1 - x) z, h = lambda m / 2 and m = delta or d,

    E[d theta] = 1/2 x (1 - x) (1 - g - z + h)
    E[d phi]   = 1/2 (1 - x) (z (1 - y) (1 - V - h) + (1 - z) y (V + h))
    lambda'    = max(lambda + eta (spent - c), 0)

with spent = (1 - x) m / 2, the mean over tokens, or their 95th percentile: m where (1 - x) / 2 >
0.05, else 0. At rest spent = c and h = z - (1 - g) -> g, so lambda = 2 g / m: for m = d that is 2 g
/ d at x = 1 - 2 c / d, and with the percentile at x = 0.9. For m = delta the mean is below c for
every x once phi is large: lambda is 0, and x -> 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy.special import comb, expit, ndtri, softmax

ACTIONS = 8
SPREAD = 2.0
"""Of a random state: its actions, and the standard deviation of its logits, which leaves it an
entropy of 1.2 nats.
"""


def penalty_direction(policy: np.ndarray, engine: np.ndarray) -> np.ndarray:
    """v of the token's penalty at lambda 1, [..., K] of p and q [..., K]."""
    penalized = engine * np.abs(policy - engine)
    return penalized.sum(axis=-1, keepdims=True) * policy - penalized


def discrepancy_slope(
    policy: np.ndarray, engine: np.ndarray, direction: np.ndarray, *, follows: bool
) -> np.ndarray:
    """dD along a direction of the trainer's logits, [...]; `follows`: the engine's logits move with
    them.
    """

    def moved(p: np.ndarray) -> np.ndarray:
        return p * (direction - np.sum(p * direction, axis=-1, keepdims=True))

    dq = moved(engine) if follows else np.zeros_like(engine)
    apart = policy - engine
    return np.sum(dq * np.abs(apart) + engine * np.sign(apart) * (moved(policy) - dq), axis=-1)


def random_states(
    noise: float, *, states: int, actions: int = ACTIONS, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """p and q [states, actions]: logits SPREAD N(0, 1), the engine's with noise N(0, 1) more on
    each.
    """
    rng = np.random.default_rng(seed)
    logits, shift = rng.normal(size=(2, states, actions))
    return softmax(SPREAD * logits, axis=-1), softmax(SPREAD * logits + noise * shift, axis=-1)


def state_direction(policy: np.ndarray, engine: np.ndarray, penalty: str) -> np.ndarray:
    """-grad_z of a state's penalty in the loss (`dcmdp_jax.algorithm.penalties`), [..., K] of p and
    q [..., K].
    """
    if penalty == "state_kl":
        return engine - policy
    slope = np.sign(policy - engine) * (engine if penalty == "state_delta" else 0.5)
    return -policy * (slope - np.sum(policy * slope, axis=-1, keepdims=True))


def falling_share(
    noise: float,
    *,
    follows: bool,
    states: int = 4000,
    actions: int = ACTIONS,
    penalty: str = "token",
) -> float:
    """Share of random states in which the token's penalty, or one in the loss, lowers D, to first
    order.
    """
    policy, engine = random_states(noise, states=states, actions=actions)
    token = penalty == "token"
    direction = (
        penalty_direction(policy, engine) if token else state_direction(policy, engine, penalty)
    )
    return float(np.mean(discrepancy_slope(policy, engine, direction, follows=follows) < 0))


_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class TwoSteps:
    """The problem and the policy that a step starts from.

    Attributes:
        theta, phi: logits of the clean way, and of the first action on the noisy way.
        shift: d, what the engine adds to phi.
        price: g, reward lost by the clean way.
        group_size: G, at least 2.
    """

    theta: float = 0.0
    phi: float = 0.0
    shift: float = 1.0
    price: float = 0.0
    group_size: int = 8

    @property
    def discrepancy(self) -> float:
        """delta of a token on the noisy way."""
        return float(abs(expit(self.phi) - expit(self.phi + self.shift)))


def _none(
    noisy: np.ndarray, delta: np.ndarray, multiplier: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    zero = np.zeros(noisy.shape)
    return zero, zero, zero


PENALTIES: Mapping[str, Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray]]] = (
    MappingProxyType(
        {
            "grpo": _none,
            "token": lambda noisy, delta, multiplier: (
                0.0 * noisy,
                multiplier * delta * noisy,
                0.0 * noisy,
            ),
            "sequence": lambda noisy, delta, multiplier: (
                multiplier * delta * noisy / 2,
                multiplier * delta * noisy / 2,
                0.0 * noisy,
            ),
            "reward": lambda noisy, delta, multiplier: (
                0.0 * noisy,
                0.0 * noisy,
                multiplier * delta * noisy / 2,
            ),
            "reward_std": lambda noisy, delta, multiplier: (
                0.0 * noisy,
                0.0 * noisy,
                multiplier * delta * noisy / 2,
            ),
            # The state's expected discrepancy is the action's own: both have the same.
            "state": _none,
        }
    )
)
"""Penalty: (on the noisy way?, delta, lambda) -> what is taken from the first token, the second,
and the reward.
"""


def expected_update(start: TwoSteps, penalty: str, multiplier: float) -> tuple[float, float]:
    """The expectation of (d theta, d phi) of one step of size 1, exactly.

    Args:
        start: problem and policy.
        penalty: of `PENALTIES`.
        multiplier: lambda.

    Raises:
        ValueError: for an unknown penalty.
    """
    _check(penalty)
    x = expit(start.theta)
    y = expit(start.phi)
    z = expit(start.phi + start.shift)
    b = 1 - 1 / start.group_size
    g = start.price
    half = multiplier * start.discrepancy / 2
    if penalty == "reward_std":
        u, v = _normalized(start, half)
    else:
        in_reward = half if penalty == "reward" else 0.0
        u = b * (in_reward - g)
        v = -b * x * (in_reward - g)
        u += half if penalty == "sequence" else 0.0
        v -= {"token": 2 * half, "sequence": half}.get(penalty, 0.0)
    return float(x * (1 - x) * u / 2), float((1 - x) * (z - y) * v / 2)


def _normalized(start: TwoSteps, half: float) -> tuple[float, float]:
    """u and v where the group's deviation divides: a sum over the number k of clean completions in
    a group.

    Rewards take two values, lead apart; with k clean ones of G the deviation (ddof 1) is |lead|
    sqrt(k (G - k) / (G (G
    - 1))), so that lead cancels but for its sign: lambda sets no scale.
    """
    lead = half - start.price
    size = start.group_size
    x = expit(start.theta)
    k = np.arange(1, size)
    deviation = abs(lead) * np.sqrt(k * (size - k) / (size * (size - 1)))
    mass = comb(size, k) * x**k * (1 - x) ** (size - k) / (deviation + _EPSILON)
    # Mean over completions of A (1[clean] - x): A of a clean one is lead (G - k) / G, of a noisy
    # one -lead k / G.
    spread = lead * float(np.sum(mass * k * (size - k))) / size**2
    return spread / (x * (1 - x)), -spread / (1 - x)


def _sampled(
    start: TwoSteps,
    theta: np.ndarray,
    phi: np.ndarray,
    penalty: str,
    multiplier: float,
    prompts: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Updates of many runs at once, [runs]; each samples `prompts` groups."""
    shape = (len(theta), prompts, start.group_size)
    x, y, z = (expit(v)[:, None, None] for v in (theta, phi, phi + start.shift))
    noisy = (rng.random(shape) >= x).astype(float)
    first = (rng.random(shape) < z).astype(float)
    on_first, on_second, in_reward = PENALTIES[penalty](noisy, np.abs(y - z), multiplier)
    rewards = 1 - start.price * (1 - noisy) - in_reward
    advantages = rewards - rewards.mean(axis=-1, keepdims=True)
    if penalty == "reward_std":
        deviation = rewards.std(axis=-1, ddof=1, keepdims=True)
        # Equal rewards: 0 and not rounding over rounding.
        advantages = np.where(
            np.ptp(rewards, axis=-1, keepdims=True) > 1e-12, advantages / (deviation + _EPSILON), 0
        )
    d_theta = (advantages - on_first) * ((1 - noisy) - x) / 2
    d_phi = (advantages - on_second) * noisy * (first - y) / 2
    return d_theta.mean(axis=(1, 2)), d_phi.mean(axis=(1, 2))


def expected_path(
    start: TwoSteps, penalty: str, multiplier: float, *, steps: int, size: float
) -> np.ndarray:
    """theta and phi after 0, 1, ... `steps` expected updates of `size`, [steps + 1, 2] float64."""
    path = [(start.theta, start.phi)]
    for _ in range(steps):
        here = dataclasses.replace(start, theta=path[-1][0], phi=path[-1][1])
        moved = expected_update(here, penalty, multiplier)
        path.append((here.theta + size * moved[0], here.phi + size * moved[1]))
    return np.array(path)


def simulated_paths(
    start: TwoSteps,
    penalty: str,
    multiplier: float,
    *,
    steps: int,
    size: float,
    runs: int,
    prompts: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """theta and phi at the end of many runs, [runs, 2]; each step samples `prompts` groups."""
    _check(penalty)
    theta = np.full(runs, start.theta)
    phi = np.full(runs, start.phi)
    for _ in range(steps):
        d_theta, d_phi = _sampled(start, theta, phi, penalty, multiplier, prompts, rng)
        theta = theta + size * d_theta
        phi = phi + size * d_phi
    return np.stack([theta, phi], axis=1)


def least_multiplier(start: TwoSteps, penalty: str) -> float:
    """lambda above which the penalty moves the policy to the clean way; infinite where none does, 0
    where any does.
    """
    _check(penalty)
    if penalty not in ("sequence", "reward", "reward_std"):
        return math.inf
    share = 1 - 1 / start.group_size if penalty == "sequence" else 1.0
    return 2 * share * start.price / start.discrepancy


def way_out_table(
    start: TwoSteps,
    multiplier: float,
    *,
    steps: int,
    size: float,
    runs: int,
    prompts: int,
    seed: int = 0,
) -> list[list[str]]:
    """Rows of a table: each penalty, its least lambda, and where theta and phi end by theory and by
    simulation.

    Args:
        start: problem and first policy.
        multiplier: lambda.
        steps, size: of a run.
        runs, prompts: simulated ones, and groups in each of their steps.
        seed: of the simulation.

    Returns:
        Per penalty: name, yes or no, least lambda, theta expected, theta simulated with its 95%
        interval, the same of phi, the discrepancy per completion's token that is expected at the
        end.
    """
    rows = []
    for penalty in PENALTIES:
        least = least_multiplier(start, penalty)
        theta, phi = expected_path(start, penalty, multiplier, steps=steps, size=size)[-1]
        rng = np.random.default_rng(seed)
        ends = simulated_paths(
            start, penalty, multiplier, steps=steps, size=size, runs=runs, prompts=prompts, rng=rng
        )
        half = ndtri(0.975) * ends.std(axis=0, ddof=1) / math.sqrt(runs)
        here = dataclasses.replace(start, theta=theta, phi=phi)
        rows.append(
            [
                penalty,
                "yes" if multiplier > least else "no",
                "none" if math.isinf(least) else f"{least:.2f}",
                f"{theta:+.3f}",
                f"{ends[:, 0].mean():+.3f} ± {half[0]:.3f}",
                f"{phi:+.3f}",
                f"{ends[:, 1].mean():+.3f} ± {half[1]:.3f}",
                f"{float(1 - expit(theta)) * here.discrepancy / 2:.4f}",
            ]
        )
    return rows


PAGE_START = TwoSteps(theta=-1.0, phi=0.0, shift=1.5, price=0.1)
PAGE_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"multiplier": 3.0, "steps": 200, "size": 0.5, "runs": 1000, "prompts": 8}
)
"""What the table is made with."""


def way_out_page() -> list[str]:
    """The table of two steps with a way out, lines of Markdown."""
    heading = ["penalty", "takes the way out", "least lambda", "theta, theory", "theta, simulated"]
    heading += ["phi, theory", "phi, simulated", "delta at the end"]
    rows = [heading, ["---"] * len(heading), *way_out_table(PAGE_START, **PAGE_OPTIONS)]
    return [f"| {' | '.join(row)} |" for row in rows]


def budget_path(
    start: TwoSteps,
    measure: str,
    budget: str,
    tolerance: float,
    *,
    rate: float,
    steps: int,
    size: float = 1.0,
) -> np.ndarray:
    """lambda, x, phi, mean delta and mean |eps| per token before each of `steps` expected updates,
    [steps, 5] float64.

    Args:
        start: problem and first policy; the group's size is not used.
        measure: "diff" or "logit".
        budget: "mean" or "p95", over tokens.
        tolerance: c.
        rate: eta; 0 leaves lambda at 0, reward alone.
        steps, size: of the policy.
    """
    theta = start.theta
    phi = start.phi
    multiplier = 0.0
    path = []
    for _ in range(steps):
        x = expit(theta)
        y = expit(phi)
        z = expit(phi + start.shift)
        penalized = abs(y - z) if measure == "diff" else abs(start.shift)
        path.append((multiplier, x, phi, (1 - x) * abs(y - z) / 2, (1 - x) * abs(start.shift) / 2))
        value = x * (1 - start.price) + (1 - x) * z
        half = multiplier * penalized / 2
        theta += size * x * (1 - x) * (1 - start.price - z + half) / 2
        phi += (
            size * (1 - x) * (z * (1 - y) * (1 - value - half) + (1 - z) * y * (value + half)) / 2
        )
        spent = (1 - x) * penalized / 2 if budget == "mean" else penalized * ((1 - x) / 2 > 0.05)
        multiplier = max(multiplier + rate * (spent - tolerance), 0.0)
    return np.array(path)


BUDGETS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "none": ("diff", "mean", 0.0, 0.0),
        "mean delta, half of the first": ("diff", "mean", 0.0058, 0.5),
        "mean \\|eps\\|, half of the first": ("logit", "mean", 0.125, 0.05),
        "95th percentile of \\|eps\\|, half of the first": ("logit", "p95", 0.5, 0.01),
    }
)
"""Row of the table: measure, statistic, c and eta."""
SURE_START = TwoSteps(theta=0.0, phi=2.5, shift=1.0, price=0.1)


def budget_page() -> list[str]:
    """The table of budgets, lines of Markdown; means of the second half of 4,000 steps."""
    rows = [["budget", "c", "lambda", "clean way", "delta", "\\|eps\\|"], ["---"] * 6]
    for name, (measure, budget, tolerance, rate) in BUDGETS.items():
        path = budget_path(SURE_START, measure, budget, tolerance, rate=rate, steps=4000)
        multiplier, x, _, delta, eps = path[2000:].mean(axis=0)
        shown = f"{tolerance:g}" if rate else ""
        rows.append([name, shown, f"{multiplier:.3f}", f"{x:.3f}", f"{delta:.4f}", f"{eps:.3f}"])
    return [f"| {' | '.join(row)} |" for row in rows]


def _check(penalty: str) -> None:
    if penalty not in PENALTIES:
        raise ValueError(f"penalty = {penalty!r}: allowed are {', '.join(PENALTIES)}")


def state_page() -> list[str]:
    """The table of the directions of penalties in the loss, lines of Markdown."""
    names = "token", "state_delta", "state_tv", "state_kl"
    rows = [["actions", "noise of the logits", "engine", *names], ["---"] * 7]
    for actions, noise in ((2, 0.1), (2, 1.0), (8, 0.1), (8, 1.0)):
        for follows in (False, True):
            how = {"follows": follows, "actions": actions}
            shares = [f"{falling_share(noise, penalty=name, **how):.0%}" for name in names]
            rows.append([str(actions), f"{noise:g}", "follows" if follows else "stays", *shares])
    return [f"| {' | '.join(row)} |" for row in rows]


def text() -> str:
    """The three tables."""
    pages = (
        ("lowers E_q[delta]", state_page()),
        ("a way out", way_out_page()),
        ("budgets", budget_page()),
    )
    return "\n\n".join("\n".join((title, "", *page)) for title, page in pages) + "\n"

"""Remedies of 2025 and 2026 by hand, and by their sources' formulas and gradients in torch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.corrections import CORRECTIONS
from dcmdp_jax.algorithm.losses import LOSSES, policy_loss
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.config.load import from_config_dict

try:
    import torch
except ImportError:  # the extra `test` has none
    torch = None
_NEEDS_TORCH = pytest.mark.skipif(torch is None, reason="torch is in the development extra")

# One completion of three tokens: p = 0.4, 0.1, 0.8 and q = 0.2, 0.2, 0.2, so that r = 2, 1/2, 4; A
# = 1.
_P = (0.4, 0.1, 0.8)
_Q = (0.2, 0.2, 0.2)
_BY_HAND = {
    "cis": (
        {"slope": 1.5, "floor": 0.005},
        (1.9, 0.5, 1.3),
    ),  # caps 1 + 1.5 (0.6, 0.9, 0.2) = 1.9, 2.35, 1.3
    # The larger of KL(0.4 || 0.2) = 0.4 log 2 + 0.6 log(3/4) = 0.105 and 0.092; 0.044; 0.8 log 4 +
    # 0.2 log(1/4) = 0.83
    "kpop": ({"high": 0.2}, (2.0, 0.5, 0.0)),
    "minpro": ({"high": 9.0}, (2.0, 1.0, 2.0)),  # 2, 1/2 * 2, 4 * min(2, 1/2)
    "ctpo": ({"low": 9.0, "high": 9.0}, (2.0, 1.0, 4.0)),  # products to each token
    "pnpo": ({"high": 9.0}, (2.0, 1.0, 4.0 ** (1 / 3))),
    "sequence_error": (
        {"high": 2.66},
        (0.0, 0.0, 0.0),
    ),  # mean(2, 2, 4) = 8 / 3, where mean d would be log(4) / 3
    "probability_band": ({"low": 0.05, "high": 0.3}, (1.0, 0.0, 0.0)),  # 0.2, -0.1, 0.6
    "vaco": ({"high": 1.4}, (0.0, 1.0, 0.0)),  # mean(1, 1/2, 3) = 1.5; A d < 0 in the second alone
    "m2po": (
        {"high": 0.5},
        (1.0, 1.0, 0.0),
    ),  # d^2 = log(2)^2 twice = 0.480, and 1.92: their mean is 0.96
}


def _tokens(now, old, rollout, advantages, anchor=None):
    shape = np.shape(now)
    log = {
        "train_logprobs": now,
        "old_logprobs": old,
        "rollout_logprobs": rollout,
        "anchor_logprobs": anchor,
    }
    return Tokens(
        **{
            name: None if x is None else np.log(np.asarray(x)).astype(np.float32)
            for name, x in log.items()
        },
        advantages=np.broadcast_to(np.float32(advantages), shape),
        completion_mask=np.ones(shape, bool),
        completion_index=np.zeros(shape, np.int32),
        num_completions=1,
    )


@pytest.mark.parametrize("name", _BY_HAND)
def test_weights_by_hand(name):
    given, weights = _BY_HAND[name]
    found = CORRECTIONS[name](_tokens([_P], [_P], [_Q], 1.0), **given)
    np.testing.assert_allclose(np.where(found.keep, found.weights, 0)[0], weights, rtol=1e-5)


def test_a_prefix_skips_what_is_not_sampled_and_ends_with_the_completion():
    # Two completions in a row; the prompt, the gap of the first (a tool's answer) and padding have
    # index 0.
    ratios = np.float32([[9, 2, 0.5, 9, 9, 4, 3, 5, 9]])
    mask = np.array([[0, 1, 1, 0, 0, 1, 1, 1, 0]], bool)
    tokens = _tokens(ratios, ratios, np.ones_like(ratios), 1.0)._replace(
        completion_mask=mask,
        completion_index=np.int32([[0, 1, 1, 0, 0, 1, 0, 0, 0]]),
        num_completions=2,
    )
    for name, expected in (
        ("minpro", [2, 1, 2, 3, 15]),
        ("pnpo", [2, 1, 4 ** (1 / 3), 3, math.sqrt(15)]),
    ):
        np.testing.assert_allclose(
            CORRECTIONS[name](tokens, high=99.0).weights[mask], expected, rtol=1e-5
        )


def _vespo(x, k, decay):
    log_w = x["log_gamma"].detach().sum().clamp(math.log(1e-8), 20)
    up = x["A"] >= 0
    k = torch.where(up, k[0], k[1])
    decay = torch.where(up, decay[0], decay[1])
    return torch.exp(decay + k * log_w - decay * log_w.exp()) * x["A"] * x["log_pi"]


def _ipo(x, high, cap):
    d = x["log_gamma"]
    ratio = torch.exp(torch.clamp(d.detach(), max=math.log(cap)) + d - d.detach())
    return torch.where((x["pi"] - x["mu"]).abs() > high, 0.0, ratio * x["A"])


def _acr(x, low, high, cap):
    upper = (1 + high) / torch.clamp(x["p"] / x["q"], max=cap)
    clipped = torch.clamp(
        x["gamma"], torch.full_like(upper, 1 - low), upper
    )  # the upper bound wins over the lower
    return torch.minimum(x["gamma"] * x["A"], clipped * x["A"])


_REGIONS = {
    "ipo": ({"high": 0.3, "cap": 1.5}, _ipo),
    "cispo": (
        {"low": 0.8, "high": 1.2},
        lambda x, low, high: x["gamma"].detach().clamp(low, high) * x["A"] * x["log_pi"],
    ),
    "sapo": (
        {"tau_positive": 1.0, "tau_negative": 1.05},
        lambda x, tau_positive, tau_negative: (
            x["A"]
            * (tau := torch.where(x["A"] > 0, tau_positive, tau_negative)).pow(-1)
            * 4
            * torch.sigmoid(tau * (x["gamma"] - 1))
        ),
    ),
    "vespo": (
        {"k_positive": 2.0, "decay_positive": 3.0, "k_negative": 3.0, "decay_negative": 2.0},
        lambda x, k_positive, decay_positive, k_negative, decay_negative: _vespo(
            x, (k_positive, k_negative), (decay_positive, decay_negative)
        ),
    ),
    "acr": ({"low": 0.2, "high": 0.2, "cap": 2.0}, _acr),
}


@_NEEDS_TORCH
@pytest.mark.parametrize("name", _REGIONS)
def test_objective_and_gradient_are_those_of_the_source(name):
    given, formula = _REGIONS[name]
    rng = np.random.default_rng(5)
    p, q = rng.uniform(0.05, 0.95, (2, 1, 24))
    now = np.clip(p * np.exp(rng.normal(0, 0.3, p.shape)), 0.01, 0.99)
    anchor = p if name == "acr" else q
    advantages = rng.choice([-1.0, 0.5, 1.0], p.shape)
    tokens = _tokens(now, p, q, advantages, anchor)
    ones = np.ones(p.shape, np.float32)

    def loss(log_pi):
        region = lambda t: -TRUST_REGIONS[name](t, **given).objective  # noqa: E731
        return policy_loss(tokens._replace(train_logprobs=log_pi), ones, loss=region)[0].total

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(tokens.train_logprobs))
    log_pi = torch.tensor(np.log(now), requires_grad=True)
    x = {
        "p": torch.tensor(p),
        "q": torch.tensor(q),
        "mu": torch.tensor(anchor),
        "A": torch.tensor(advantages),
    }
    log_gamma = log_pi - x["mu"].log()
    x |= {"log_pi": log_pi, "pi": log_pi.exp(), "log_gamma": log_gamma, "gamma": log_gamma.exp()}
    total = -formula(x, **given).sum()
    total.backward()
    assert float(value) == pytest.approx(total.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, log_pi.grad, rtol=2e-4, atol=1e-6)


def test_the_square_of_the_log_ratio_by_hand():
    # -gamma A + tau d^2 with pi = 0.4, mu = p = 0.5, q = 0.2: gamma = 0.8, d = log 2; the slope is
    # -gamma A + 2 tau d.
    tokens = _tokens([[0.4]], [[0.5]], [[0.2]], 1.0, [[0.5]])
    tau = 0.1
    loss = lambda t: LOSSES["log_ratio_squared"](t, tau=tau)  # noqa: E731

    def total(log_pi):
        moved = tokens._replace(train_logprobs=log_pi)
        return policy_loss(moved, np.float32([[1.0]]), loss=loss)[0].total

    value, slope = jax.value_and_grad(total)(jnp.asarray(tokens.train_logprobs))
    assert float(value) == pytest.approx(-0.8 + tau * math.log(2) ** 2, rel=1e-6)
    assert float(slope[0, 0]) == pytest.approx(-0.8 + 2 * tau * math.log(2), rel=1e-6)


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        (
            "loss",
            "log_ratio_squared(tau=-1)",
            r"log_ratio_squared\(tau=-1.0\): tau=-1.0; must be a finite number",
        ),
        (
            "loss",
            "log_ratio_squared(trust_region=1)",
            "takes no parameters; set them in trust_region",
        ),
        (
            "trust_region",
            "cispo(low=2,high=1)",
            r"cispo\(low=2.0,high=1.0\): high=1.0; must be a finite number in \[2",
        ),
        (
            "method",
            "state_tv",
            "got 'state_tv', needs the engine's top-k tokens; set rollout.top_logprobs=32 or more",
        ),
        ("corrections", "cis(slope=-1)", r"cis\(slope=-1.0\): slope=-1.0; must be a finite number"),
    ],
)
def test_bad_parameters_are_refused(setting, text, message):
    with pytest.raises(ValueError, match=f"config.algorithm.{setting}: .*{message}"):
        from_config_dict({"task": {"train": "x"}, "algorithm": {setting: text}})


def test_a_penalty_of_states_has_no_level():
    config = {"task": {"train": "x"}, "rollout": {"top_logprobs": 32}}
    for level in ("sequence", "reward"):
        with pytest.raises(
            ValueError,
            match="config.algorithm.level: .*with method=state_kl, which penalizes states",
        ):
            from_config_dict(config | {"algorithm": {"method": "state_kl", "level": level}})
    assert (
        from_config_dict(config | {"algorithm": {"method": "state_kl"}}).algorithm.state_penalty
        == "state_kl"
    )

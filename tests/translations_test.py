"""Options of other frameworks: the settings of each row exist, and give the slope that its source
has.
"""

import csv
import datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm.losses import policy_loss
from dcmdp_jax.algorithm.remedies import Tokens
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.training.objective import loss_weights, signals_of
from docs import translations

_ROWS = translations.rows()
_LENGTHS = 1, 3, 5, 8, 8, 10, 12, 12


def _settings(text):
    config = {"task": {"train": "x"}, "rollout": {"max_completion_tokens": 64}, "algorithm": {}}
    for name, value in (word.split("=", 1) for word in text.split()):
        section, _, setting = name.rpartition(".")
        config[section or "algorithm"][setting] = _value(value)
    return from_config_dict(config).algorithm


def _value(text):
    return {"true": True}.get(text) or (int(text) if text.isdigit() else text)


def _completions(spread):
    """log-probs now, of the trainer and of the engine of eight completions, and the advantage of
    each.
    """
    rng = np.random.default_rng(11)
    for length, advantage in zip(
        _LENGTHS, (1.0, -1.0, 0.5, -0.7, 1.0, -1.0, 0.5, -0.7), strict=True
    ):
        engine = -rng.exponential(0.7, length) - 0.02
        own = spread * rng.choice([0.002, 0.3, 1.0])
        trainer = np.minimum(engine + own * rng.normal(size=length), -0.01)
        yield np.minimum(trainer + own * rng.normal(size=length), -0.01), trainer, engine, advantage


def _kl(a, b):
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def _vespo(w, advantage):
    k, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    w = np.clip(w, 1e-8, np.exp(20))
    return w**k * np.exp(decay * (1 - w))


def _sapo(gamma, tau):
    gate = 1 / (1 + np.exp(-tau * (gamma - 1)))
    return 4 * gate * (1 - gate)  # of 4 / tau gate


_NUMPY = "where", "clip", "exp", "log", "abs", "sign", "minimum", "maximum", "cumsum"
_FUNCTIONS = {
    **{name: getattr(np, name) for name in _NUMPY},
    "prod": lambda x: np.exp(np.log(x).sum()),
    "geo": lambda x: np.exp(np.log(x).mean()),
    "mean": np.mean,
    "total": np.sum,
    "max": np.max,
    "min": np.min,
    "kl": _kl,
    "vespo": _vespo,
    "sapo": _sapo,
    "before_min": lambda x: np.concatenate(([1.0], np.minimum.accumulate(x)[:-1])),
}


def _by_formula(slope, spread):
    """The row's slope of the objective in each token's log-prob, float64; all tokens at once for
    M2PO's sort.
    """
    squares = np.sort(np.concatenate([(p - q) ** 2 for _, p, q, _ in _completions(spread)]))
    kept = max(int((squares.cumsum() / np.arange(1, len(squares) + 1) <= 0.04).sum()), 1)
    functions = _FUNCTIONS | {"m2po": lambda d, _: np.where(d * d > squares[kept - 1], 0.0, 1.0)}
    for pi, p, q, advantage in _completions(spread):
        names = {
            "A": advantage,
            "pi": np.exp(pi),
            "p": np.exp(p),
            "q": np.exp(q),
            "d": p - q,
            "r": np.exp(p - q),
            "g": np.exp(pi - p),
            "u": np.exp(pi - q),
            "t": np.arange(1, len(p) + 1),
        }
        yield np.broadcast_to(eval(slope, {"__builtins__": {}}, functions | names), p.shape)


def _by_ours(text, spread):
    shape = len(_LENGTHS), max(_LENGTHS)
    mask = np.arange(shape[1]) < np.array(_LENGTHS)[:, None]
    columns = [np.zeros(shape, np.float32) for _ in range(4)]
    for row, (*logprobs, advantage) in enumerate(_completions(spread)):
        for column, values in zip(
            columns, (*logprobs, np.full(_LENGTHS[row], advantage)), strict=True
        ):
            column[row, mask[row]] = values
    now, old, rollout, advantages = columns
    settings = _settings(text)
    index = np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape)
    tokens = Tokens(
        train_logprobs=now,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        completion_mask=mask,
        completion_index=index,
        num_completions=shape[0],
        multiplier=jnp.float32(0),
        tolerance=jnp.float32(1),
    )
    remedies = settings.remedies()
    signals = signals_of(settings, remedies, tokens, np.ones(shape[0], np.float32))
    weights = loss_weights(settings, signals)
    how = {"loss": remedies.loss, "ratio_level": settings.ratio_level}
    moving = lambda now: signals.tokens._replace(train_logprobs=now)  # noqa: E731
    slopes = -jax.grad(lambda now: policy_loss(moving(now), weights, **how)[0].total)(
        jnp.asarray(now)
    )
    return [np.asarray(slopes)[row, mask[row]] for row in range(shape[0])]


_SPREADS = 0.1, 0.8, 6.0
_PLAIN = "where((A>0)&(g>1.24)|(A<0)&(g<0.8), 0, g)*A"
_SLOPES = {f"{row['framework']}: {row['option']}": row for row in _ROWS if row["slope"]}


@pytest.mark.parametrize("name", _SLOPES)
def test_our_settings_have_the_slope_of_the_source(name):
    ours = _SLOPES[name]["ours"]
    slope = _SLOPES[name]["slope"]
    differs = False
    for spread in _SPREADS:
        found, expected, plain = map(
            np.concatenate,
            (_by_ours(ours, spread), [*_by_formula(slope, spread)], [*_by_formula(_PLAIN, spread)]),
        )
        np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
        differs |= not np.allclose(expected, plain, rtol=1e-3)
    assert differs  # the completions tell the option from none


def test_rows_are_dated_and_their_settings_exist():
    assert len(_ROWS) > 100 and {row["framework"] for row in _ROWS} >= {
        "verl",
        "TRL",
        "slime",
        "prime-rl",
        "NeMo-RL",
        "SkyRL",
        "AReaL",
        "ROLL",
        "OpenRLHF",
        "open-instruct",
        "miles",
        "ms-swift",
        "Tunix",
        "postax",
        "agent-lightning",
    }
    for row in _ROWS:
        assert row["commit"] and datetime.date.fromisoformat(row["read"]) > datetime.date(
            2026, 1, 1
        )
        assert row["ours"] or row["note"], row
        _settings(row["ours"])
        assert translations.is_old(row) == (
            row["read"] < "2026-09-28"
        )  # 60 days before the newest, 2026-11-27


def test_the_page_marks_old_rows_and_slopes_that_are_ours():
    page = translations.page()
    assert "| at PR #3586, 2026-11-27" in page and "Read at 624b824, old: 2026-08-21." in page
    ours = [row for row in _ROWS if row["note"].startswith("slope of ours: ")]
    assert len(ours) >= 10 and all(row["slope"] for row in ours)
    # AReaL's SAPO has the engine's probabilities in the denominator, verl's its own mean; slime
    # counts what it rejects.
    areal, verl = (
        _SLOPES[f"{name}: {option}"]
        for name, option in (
            ("AReaL", "use_sapo_loss (with use_decoupled_loss=false, which it asks for)"),
            ("verl", "loss_mode=sapo, tau_pos=1, tau_neg=1.05"),
        )
    )
    assert "ratio_denominator=rollout" in areal["ours"] and "seq_mean_token_mean" in verl["note"]
    rejecting = [
        row for row in _ROWS if row["framework"] in ("slime", "miles") and "mis.py" in row["option"]
    ]
    assert len(rejecting) == 3 and all(
        "correction_denominator=all" in row["note"] for row in rejecting
    )


def test_the_page_is_that_of_the_table():
    page = (Path(translations.__file__).parent / "translations.md").read_text(encoding="utf-8")
    assert page == translations.page()
    with translations.TABLE.open(encoding="utf-8", newline="") as file:
        assert len(list(csv.reader(file))) == len(_ROWS) + 1

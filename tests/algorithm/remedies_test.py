"""The convention of remedies: what a user's function may return, and how the rest is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dcmdp_jax.algorithm import losses, penalties
from dcmdp_jax.algorithm.remedies import OwnRemedy, Tokens, check_terms, check_values
from dcmdp_jax.algorithm.stats import Max, Mean
from dcmdp_jax.algorithm.trust_regions import TRUST_REGIONS
from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.load import from_config_dict
from tests.support.refusals import refused

_FILE = """
import jax
import jax.numpy as jnp
import numpy as np
from dcmdp_jax.algorithm.remedies import Corrected, Region
from dcmdp_jax.algorithm.stats import Max, Sum

def right(tokens, *, knee=0.1): return tokens.advantages - knee, {"most": Max(jnp.max(tokens.advantages))}
def positional(tokens, knee=0.1): return tokens.advantages * knee
def keep(tokens): return Corrected(jnp.ones(tokens.advantages.shape), tokens.completion_mask)
def region(tokens): return Region(tokens.ratio * tokens.advantages)
def loss(tokens): return -tokens.train_logprobs * tokens.advantages
def completions(tokens): return jnp.sum(tokens.advantages, axis=1)
def half(tokens): return tokens.advantages.astype(jnp.bfloat16)
def divides(tokens): return tokens.advantages / tokens.discrepancy
def misspelled(tokens):
    return tokens.advantage
def branch(tokens):
    return tokens.advantages if tokens.multiplier > 0 else tokens.discrepancy
def by_numpy(tokens): return np.asarray(tokens.advantages)
def nothing(tokens): pass
def no_argument(): return 1
def needs(tokens, *, knee): return tokens.advantages * knee
def number(tokens): return tokens.advantages, {"a": 3.0}
def unreduced(tokens): return tokens.advantages, {"a": Sum(tokens.advantages)}
def three(tokens): return tokens.advantages, {}, {}
def fixed(tokens): return tokens.advantages + jnp.ones((2, 12))
def keep_as_number(tokens): return Corrected(jnp.ones(tokens.advantages.shape), jnp.ones(tokens.advantages.shape))
def root(tokens): return jnp.sqrt(jnp.abs(tokens.train_logprobs - tokens.rollout_logprobs))
def leaves(tokens):
    raise SystemExit(3)
def on_host(x): return x / {}["zero"]
def calls_back(tokens):
    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(tokens.advantages.shape, jnp.float32), tokens.advantages)
def flat(tokens): return jax.lax.stop_gradient(-tokens.ratio * tokens.advantages)
def flat_region(tokens): return Region(tokens.advantages)
def since_start(tokens): return tokens.advantages - jnp.abs(tokens.start_logprobs - tokens.old_logprobs)
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(_FILE)
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    monkeypatch.chdir(tmp_path)

    def check(**algorithm):
        rollout = {"max_completion_tokens": 100}
        settings = from_config_dict(
            {"task": {"train": "x"}, "rollout": rollout, "algorithm": algorithm}
        ).algorithm
        check_own_remedies(settings)
        return settings

    return check


@pytest.mark.parametrize(
    "algorithm",
    [
        {"method": "mine.py:right"},
        {"method": "mine.py:right(knee=2)"},
        {"method": "mine.py:positional(knee=2)"},
        {"method": "mine.py:since_start"},
        {"corrections": "tis,mine.py:keep,veto"},
        {"trust_region": "mine.py:region"},
        {"loss": "mine.py:loss"},
        {"loss": "mine.py:loss", "method": "mine.py:needs(knee=1)", "corrections": "mine.py:keep"},
        {"method": "configs.remedies:missing"},
    ],
)
def test_right_ones_pass(check, algorithm):
    if algorithm == {"method": "configs.remedies:missing"}:
        with pytest.raises(
            ValueError, match="configs.remedies has no function 'missing'; it has get_config"
        ):
            check(**algorithm)
    else:
        check(**algorithm)


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        (
            {"method": "mine.py:completions"},
            "returned advantages of shape (2,); must be (2, 12) as the tokens",
        ),
        ({"method": "mine.py:half"}, "returned advantages in bfloat16; must be float32"),
        (
            {"method": "mine.py:divides"},
            "returned advantages that are not finite on 6 of 22 tokens",
        ),
        ({"method": "mine.py:misspelled"}, "no attribute 'advantage' (mine.py, line 17)"),
        (
            {"method": "mine.py:branch"},
            "(mine.py, line 19); it is compiled: write jnp.where for `if`",
        ),
        (
            {"method": "mine.py:by_numpy"},
            "(mine.py, line 20); it is compiled: write jnp.where for `if`",
        ),
        ({"method": "mine.py:nothing"}, "returned advantages as NoneType; must be an array"),
        (
            {"method": "mine.py:no_argument"},
            "takes no token arrays; its first argument must be `tokens`",
        ),
        ({"method": "mine.py:needs"}, "needs knee, such as mine.py:needs(knee=0.1)"),
        ({"method": "mine.py:right(nee=1)"}, "has no parameter 'nee'; it has knee"),
        ({"method": "mine.py:right(knee=true)"}, "knee must be a number"),
        (
            {"method": "mine.py:number"},
            "returned the statistic 'remedy/number/a' as float; statistics are a dict",
        ),
        (
            {"method": "mine.py:unreduced"},
            "returned the statistic 'remedy/unreduced/a' of shape (2, 12); must be ()",
        ),
        (
            {"method": "mine.py:three"},
            "returned a tuple of 3; return the terms, or (terms, statistics)",
        ),
        (
            {"method": "mine.py:fixed"},
            "incompatible shapes for broadcasting: (3, 5), (2, 12). (mine.py, line 27)",
        ),
        (
            {"method": "mine.py:missing"},
            "mine.py has no function 'missing'; it has right, positional, keep",
        ),
        ({"method": "absent.py:f"}, "absent.py:f: no such file"),
        (
            {"method": "broken.py:f"},
            "can't import broken.py: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ({"method": "no.module:f"}, "can't import no.module: ModuleNotFoundError"),
        ({"method": "mine.py:"}, "a function of yours is path.py:function or module:function"),
        ({"method": "mine.py:leaves"}, "mine.py:leaves: raised SystemExit: 3 (mine.py, line 31)"),
        (
            {"method": "mine.py:calls_back"},
            "mine.py:calls_back: raised KeyError: 'zero' (mine.py, line 32)",
        ),
        (
            {"loss": "mine.py:flat"},
            "returned losses without any gradient, so that nothing is learned; compute them",
        ),
        (
            {"trust_region": "mine.py:flat_region"},
            "returned objective without any gradient, so that nothing is",
        ),
        ({"method": "grpo,dc_grpo"}, "got 'grpo,dc_grpo', must name one function"),
        (
            {"corrections": "mine.py:loss"},
            "returned an array; must be Corrected(weights, keep, truncated)",
        ),
        ({"corrections": "mine.py:keep_as_number"}, "returned keep in float32; must be bool"),
        (
            {"trust_region": "mine.py:loss"},
            "returned an array; must be Region(objective, low, high)",
        ),
        (
            {"loss": "mine.py:root"},
            "returned the gradient of train_logprobs that are not finite on 6 of 22 tokens",
        ),
        (
            {"loss": "mine.py:loss", "trust_region": "clip(dual=3)"},
            "which bounds the surrogate alone; leave one",
        ),
        ({"trust_region": "clip(low=true)"}, "clip(low=true): low must be a number"),
        ({"trust_region": "clip(low=nan)"}, "low=nan; must be a finite number in [0, 1)"),
        (
            {"trust_region": "clip(dual=0.5)"},
            "clip(dual=0.5): dual=0.5; must be a finite number in (1, inf)",
        ),
        ({"method": "mine.py:right", "loss": "other.py:right"}, "two functions have this name"),
    ],
)
def test_whatever_else_is_one_line_with_setting_and_function(check, algorithm, line):
    said = refused(check, **algorithm)
    name, value = next(iter(algorithm.items()))
    assert (
        said.startswith(("config.algorithm: got 'right', two", f"config.algorithm.{name}: "))
        and "\n" not in said
    )
    assert line in said


@pytest.mark.parametrize("name", penalties.PENALTIES)
def test_ours_keep_the_convention_too(name):
    check_terms("penalty", penalties.PENALTIES[name])
    check_values("penalty", penalties.PENALTIES[name])


@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_trust_regions_of_ours_keep_it_too(name):
    check_terms("policy-loss variant", TRUST_REGIONS[name])
    check_values("policy-loss variant", TRUST_REGIONS[name])


def test_statistics_are_named_after_the_function_and_have_no_gradient():
    def mine(tokens, *, scale):
        return scale * tokens.train_logprobs, {"most": Max(jnp.max(tokens.train_logprobs))}

    train = jnp.float32([[-1.0, -3.0]])
    tokens = Tokens(
        train_logprobs=train,
        anchor_logprobs=train,
        advantages=jnp.ones((1, 2)),
        completion_mask=np.ones((1, 2), bool),
    )

    def total(train, weight):
        loss, statistics = losses.policy_loss(
            tokens._replace(train_logprobs=train),
            jnp.ones((1, 2)),
            loss=OwnRemedy("mine", mine, {"scale": 2.0}),
        )
        return loss.total + weight * statistics["remedy/mine/most"].largest, (loss, statistics)

    gradient, (loss, statistics) = jax.grad(total, has_aux=True)(train, 5.0)
    assert float(loss.total) == -8.0 and isinstance(loss, Mean)
    assert float(statistics["remedy/mine/most"].value()) == -1.0
    np.testing.assert_array_equal(
        gradient, [[2.0, 2.0]]
    )  # 7 at the largest if the statistic had one


def test_a_loss_sees_zero_outside_the_tokens_that_take_part():
    seen = {}

    def loss(tokens):
        seen.update(tokens._asdict())
        return tokens.train_logprobs / tokens.train_logprobs * tokens.advantages

    broken = jnp.float32([[-1.0, jnp.nan, -2.0]])
    tokens = Tokens(
        train_logprobs=broken,
        anchor_logprobs=broken,
        rollout_logprobs=broken,
        start_logprobs=broken,
        advantages=broken,
        completion_mask=np.array([[True, False, True]]),
    )
    found, _ = losses.policy_loss(tokens, np.array([[1.0, 1.0, 0.0]]), loss=loss)
    assert float(found.total) == -1.0
    np.testing.assert_array_equal(seen["completion_mask"], [[True, False, False]])
    for name in (
        "train_logprobs",
        "rollout_logprobs",
        "start_logprobs",
        "advantages",
        "anchor_logprobs",
    ):
        np.testing.assert_array_equal(seen[name], [[-1.0, 0.0, 0.0]])

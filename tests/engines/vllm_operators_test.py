"""Faults planted in the weights and the cache of a real vLLM: the leg and the layer are named."""

import re

import jax
import numpy as np
import pytest

from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.probe.columns.analysis import analyze
from dcmdp_jax.probe.columns.evidence import outliers
from dcmdp_jax.probe.columns.page import table
from dcmdp_jax.probe.live.compare import Setup, compare
from dcmdp_jax.probe.live.engines import TrainingStack, sample
from tests.support.processors import skip_unless_computed
from tests.support.vllm_tools import STOP, prompts, random_params, small_model

CONFIG = small_model(tied=False)
RIGHT = random_params(CONFIG, 0)
OTHER = random_params(CONFIG, 1)
SAMPLING = SamplingParams(4, 24, stop_token_ids=(STOP,))


@pytest.fixture(scope="module")
def engine(start):
    return start(CONFIG, probe=False)


def analysis(engine, synced):
    engine.sync_weights(synced, 0)
    asked = prompts(8, CONFIG)
    setup = Setup(config=CONFIG, params=RIGHT, prompts=asked, temperature=1.0)
    pair = {"engine": engine, "trainer": TrainingStack(CONFIG, RIGHT, compute=Compute())}
    return analyze(compare("pair", {}, sample(engine, asked, SAMPLING, seed=0), pair, setup))


def test_a_cache_in_fp8_is_the_only_difference_of_right_weights(start):
    skip_unless_computed("float32", "fp8")
    found = analysis(start(CONFIG, kv_cache_dtype="fp8", probe=False), RIGHT)
    operators = found.evidence.operators
    assert [str(each) for each in outliers(operators)] == ["cache of layer 0", "cache of layer 1"]
    assert all(each.relative > 0.01 for each in outliers(operators))
    # vLLM's float32 operators are ours, its attention too once ours rounds keys and values as its
    # cache does.
    others = {str(each): each.relative for each in operators if each.operator != "cache"}
    assert list(others)[:4] == [
        "embedding",
        "norm of layer 0",
        "attention of layer 0",
        "mlp of layer 0",
    ]
    assert len(others) == 9 and max(others.values()) < 1e-5, others
    assert (
        found.findings[0].cause == "cache"
        and "cache of layer 0 (and 1 more like it) gives" in found.findings[0].evidence[0]
    )
    assert re.search(
        "11 operators compared on the same input: median relative error .*, first outlier cache of",
        table([found]),
    )
    # vLLM reads the cache in one pass too: its decoding is its scores.
    decoding, one_pass = found.evidence.legs
    assert decoding.share + one_pass.share == pytest.approx(1, abs=1e-9) and one_pass.share > 0.99
    assert decoding.log_ratio + one_pass.log_ratio == pytest.approx(found.statistics.k1, abs=1e-6)


@pytest.mark.parametrize(
    ("path", "cause", "place"),
    [
        (("layers", "mlp", "down", "kernel"), "mlp", "mlp of layer 1"),
        (("layers", "attention", "k", "kernel"), "attention", "attention of layer 1"),
        (("layers", "mlp_norm", "scale"), "norm", "norm of layer 1"),
        (("output",), "head", "head"),
    ],
)
def test_a_wrong_matrix_is_named_with_its_layer(engine, path, cause, place):
    def synced(at, right, other):
        if tuple(key.key for key in at) != path:
            return right
        return right.at[1].set(other[1]) if path[0] == "layers" else other

    found = analysis(engine, jax.tree_util.tree_map_with_path(synced, RIGHT, OTHER))
    assert [str(each) for each in outliers(found.evidence.operators)] == [place]
    assert [finding.cause for finding in found.findings][:1] == [cause]
    assert f"the {place} gives another output" in found.findings[0].evidence[0]
    assert found.evidence.legs[1].share > 0.99


def test_a_module_that_is_not_called_is_named(engine):
    engine.sync_weights(RIGHT, 0)
    with pytest.raises(
        EngineError, match=r"observe: model.layers.2.mlp gave shape \(0,\) for 3 tokens"
    ):
        engine.observe([np.array([4, 5, 6])], ["model.layers.2.mlp"])
    read, gave = engine.observe([np.array([4, 5, 6])], ["model.layers.1.mlp"])["model.layers.1.mlp"]
    assert read.shape == gave.shape == (3, 64)

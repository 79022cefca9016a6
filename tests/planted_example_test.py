"""examples/planted: the engine is wrong after N alone, by 1.5 nats on the logit of A, and samples
what it reports.
"""

import dataclasses
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.models.params import init_params
from tests.support.sampling import local_engine
from tests.support.vllm_tools import small_model

_FILE = str(Path(__file__).parents[1] / "examples" / "planted" / "planted.py")
_IDS = dict(zip("ABCN", build_tokenizer().convert_tokens_to_ids(list("ABCN")), strict=True))


@pytest.fixture(scope="module")
def engines():
    """The planted engine and the embedded one, exact, with the same weights."""
    example = runpy.run_path(_FILE)
    model = dataclasses.replace(small_model(vocab_size=104), initializer_range=0.05)
    params = init_params(model, jax.random.key(3))
    arguments = EngineArguments(
        "float32", "float32", "auto", 64, 64, 0, example["Settings"](), model=model
    )
    planted = example["ENGINE"].build(arguments)
    exact = local_engine(model, max_total_tokens=64)
    for engine in (planted, exact):
        engine.sync_weights(params, 3)
    return planted, exact


def _completions(*texts):
    return [np.array([_IDS[letter] for letter in text], np.int32) for text in texts]


def test_logprobs_differ_after_n_alone_and_by_what_is_planted(engines):
    planted, exact = engines
    texts = "NA", "NB", "CA", "CB", "AN", "NC"
    prompts = [np.array([9, 25, 40 + n], np.int32) for n in range(len(texts))]
    [theirs, own] = (
        [*e.score(prompts, _completions(*texts), temperature=1.0)] for e in (planted, exact)
    )
    # log(p e^s / (1 - p_A + p_A e^s)) of A, and without e^s above of another token; p_A by the
    # exact engine.
    p_a = [
        float(np.exp(exact.score([p], _completions("NA"), temperature=1.0)[0][1])) for p in prompts
    ]
    for n, text in enumerate(texts):
        expected = own[n].astype(np.float64)
        if text[0] == "N":
            expected[1] += 1.5 * (text[1] == "A") - np.log(1 - p_a[n] + p_a[n] * np.exp(1.5))
        np.testing.assert_allclose(theirs[n], expected, atol=2e-5)


def test_it_samples_the_distribution_that_it_reports(engines):
    planted, _ = engines
    prompt = np.array([9, 25, _IDS["N"]], np.int32)  # the first token is sampled after N
    count = 4096
    episodes = collect(planted.generate([prompt], SamplingParams(count, 1), seed=1, step=0))
    first = np.array([episode.completion_ids[0] for episode in episodes])
    [reported] = planted.score([prompt], _completions("A"), temperature=1.0)
    p = float(np.exp(reported[0]))
    assert abs((first == _IDS["A"]).mean() - p) < 4 * np.sqrt(p * (1 - p) / count)
    row = int(np.argmax(first == _IDS["A"]))
    assert episodes[row].rollout_logprobs[-1] == pytest.approx(float(reported[0]), abs=1e-6)
    [again] = collect(
        planted.generate([prompt], SamplingParams(1, 1), seed=1, step=0, first_prompt=row)
    )
    assert again.completion_ids.tolist() == [_IDS["A"]]


def test_rewards_and_penalizes_are_those_of_the_task():
    example = runpy.run_path(_FILE)
    assert example["score"](["NA", "NB", "CA", "CB", "AC", "N"]) == [1.0, 1.0, 0.9, 0.9, 0.0, 0.0]
    config = parse(["train", f"--config={_FILE}:sequence,30"]).config
    assert (
        config.algorithm.level,
        config.algorithm.multiplier,
        config.algorithm.dual_learning_rate,
    ) == (
        "sequence",
        30.0,
        0.0,
    )

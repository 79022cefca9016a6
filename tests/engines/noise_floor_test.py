"""The noise floor that a run against real vLLM records, where one pass over whole rows shows
nothing.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import collect
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.engines.protocol import SamplingParams, sample_alone
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params
from dcmdp_jax.parallel.backend import processor_features
from tests.support.processes import finished
from tests.support.sampling import local_engine


@pytest.mark.long
@pytest.mark.usefixtures("vllm_is_installed")
def test_a_run_sees_the_floor_of_a_bfloat16_engine(run_environment, tmp_path):
    """A wide random model: research/mismatch.py has 0.003 to 0.005 for it with each request
    alone.
    """
    tokenizer = build_tokenizer()
    others = dict(tie_word_embeddings=False, max_position_embeddings=128, initializer_range=0.4)
    config = ModelConfig("qwen3", len(tokenizer), 256, 512, 4, 4, 2, 64, **others)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", (tokenizer.eos_token_id,))
    save_params(
        init_params(config, jax.random.key(0)),
        config,
        tmp_path / "model",
        dtype="float32",
        tokenizer_dir=tmp_path / "tokenizer",
    )
    finished(
        "-m",
        "bin.train",
        "--config=configs/demo_vllm.py:debug",
        f"--config.run_dir={tmp_path / 'run'}",
        f"--config.model.path={tmp_path / 'model'}",
        "--config.training.steps=1",
        "--config.evaluation.every_steps=0",
        "--config.warmup.steps=0",
        env=run_environment,
    )
    [record] = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # Products on AMX tiles depend on the number of rows; on an AMD EPYC without them a batch of one
    # had the same bits.
    floor = record["mismatch/noise_floor"]
    assert (5e-4 if "amx_tile" in processor_features() else 0.0) <= floor < 0.02


def test_the_same_tokens_come_again_and_the_comparison_ends_where_they_part():
    config = ModelConfig("qwen3", 64, 32, 64, 2, 2, 1, 16, max_position_embeddings=64)
    engine = local_engine(config, precision="exact", max_total_tokens=32, min_rows=1)
    engine.sync_weights(init_params(config, jax.random.key(1)), 0)
    prompts = [np.array([5, 6, 7 + place], np.int32) for place in range(4)]
    sampling = SamplingParams(3, 12)
    episodes = collect(engine.generate(prompts, sampling, seed=3, step=9))
    # Rows 4 and 11, in another batch: the same draws. A limit of fewer tokens changes none of them.
    rows = {4: episodes[4], 11: episodes[11]}
    together, alone = sample_alone(engine, rows, SamplingParams(3, 8), seed=3, step=9)
    assert together.shape == (16,)
    np.testing.assert_array_equal(together[:8], episodes[4].rollout_logprobs[3:11])
    np.testing.assert_allclose(alone, together, atol=1e-5)
    # Another token at place 5 of the first: what follows is another completion, and is not
    # compared.
    changed = episodes[4].token_ids.copy()
    changed[3 + 5] = (changed[3 + 5] + 1) % 64
    rows[4] = dataclasses.replace(episodes[4], token_ids=changed)
    together, _ = sample_alone(engine, rows, SamplingParams(3, 8), seed=3, step=9)
    assert together.shape == (5 + 8,)

"""The comparison with other trainers: what all contenders are given, and the least that a step
computes.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare import needed_flop
from benchmarks.peers.inputs import WORKLOADS, Workload, make_inputs
from benchmarks.peers.rounds import Job, cpu_seconds, peak_mib
from benchmarks.workload import GROUP, PROMPTS, model
from dcmdp_jax.data.tokenizer import end_token_ids, load_tokenizer
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute, hidden_states, output_kernel, unpacked_inputs
from dcmdp_jax.models.hf_weights import load_params
from dcmdp_jax.models.params import num_params


def _job(*, ends: bool) -> Job:
    none = dict.fromkeys(("checkpoint", "problems", "scratch"), "")
    work = dict(
        prompts=1,
        group=2,
        prompt_tokens=3,
        new_tokens=4,
        prompt_lengths=[3],
        lengths=[4, 4],
        ends=ends,
    )
    return Job(part="sampler", parameters=1, cores=1, **none, **work)


def test_needed_operations_by_hand() -> None:
    config = ModelConfig("qwen3", 10, 8, 16, 2, 2, 1, 4, tie_word_embeddings=True)
    workload = Workload(
        "", prompt_tokens=2, new_tokens=3, least_prompt=2, median=3, end_probability=0.0
    )
    # Sequences of 5 tokens. Causal attention has 1 + 2 + 3 + 4 + 5 = 15 pairs in each of 2 layers
    # and 2 heads; scores and values are 2 products of 2 x 4 operations for a pair, forward once and
    # backward twice: 2 * 2 * 15 * 16 * 3.
    one = 6 * num_params(config) * 5 + 2880
    assert needed_flop("train1", config, workload) == PROMPTS * GROUP * one
    # A forward pass more.
    assert needed_flop("train4", config, workload) == pytest.approx(PROMPTS * GROUP * one * 4 / 3)
    assert needed_flop("train1", config, workload, prompts=2, group=3) == 6 * one
    assert needed_flop("rl", config, workload) == 0


def test_ragged_lengths_have_the_stated_median_and_limit() -> None:
    workload = WORKLOADS["ragged"]
    lengths = np.array(workload.lengths())
    assert (
        lengths.size == PROMPTS * GROUP and lengths.max() == 256 and 50 <= np.median(lengths) <= 78
    )
    assert {16 <= length <= 48 for length in workload.prompt_lengths(PROMPTS)} == {True}
    assert set(WORKLOADS["uniform"].lengths()) == {64} and set(
        WORKLOADS["uniform"].prompt_lengths(3)
    ) == {16}


@pytest.mark.parametrize("lengths", WORKLOADS)
def test_the_end_token_is_the_models_own_and_has_its_probability_at_every_position(
    tmp_path, lengths
) -> None:
    config = model("0.6M")
    workload = WORKLOADS[lengths]
    checkpoint, _ = make_inputs(config, tmp_path, workload)
    tokenizer = load_tokenizer(str(checkpoint))
    assert end_token_ids(tokenizer, checkpoint, vocab_size=config.vocab_size) == (1,)
    params = load_params(checkpoint, config, dtype="float32")
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (2, 24)).astype(np.int32)
    hidden = hidden_states(params, config, unpacked_inputs(ids), Compute())
    logits = np.asarray(hidden @ output_kernel(params), np.float64)
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    np.testing.assert_allclose(probabilities[..., 1], workload.end_probability, rtol=0.1)
    assert probabilities[..., 0].max() < 1e-30


def test_completions_that_are_none_of_the_workload_are_refused() -> None:
    _job(ends=False).check_completions([[1] * 4, [1] * 4])
    _job(ends=True).check_completions([[1] * 4, [1]])
    with pytest.raises(RuntimeError, match="2 completions of 3 to 4 tokens, asked for 2 of 4"):
        _job(ends=False).check_completions([[1] * 4, [1] * 3])
    # Were the end token never sampled, the workload would be another one.
    with pytest.raises(
        RuntimeError, match="2 completions of 4 to 4 tokens, asked for 2 of at most 4"
    ):
        _job(ends=True).check_completions([[1] * 4, [1] * 4])


def test_time_and_memory_of_a_process_that_was_started_count() -> None:
    # An engine's sidecar computes in a process of its own.
    program = (
        "import time; x = b'x' * (100 << 20)\nwhile time.process_time() < 0.5: "
        "pass\nprint('done', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    seconds = cpu_seconds()
    mib = peak_mib()
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:
        assert child.stdout.readline() == b"done\n"
        fields = Path(f"/proc/{child.pid}/stat").read_text().split()
        used_ticks = int(fields[13]) + int(fields[14])
        assert used_ticks > 0 and cpu_seconds() - seconds >= used_ticks / os.sysconf("SC_CLK_TCK")
        assert peak_mib() - mib > 100
        child.communicate(b"\n")

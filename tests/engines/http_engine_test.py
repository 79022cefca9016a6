"""`RemoteEngine` against a real vLLM server on this machine's CPU.

Broken servers are in http_client_test.py.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import jax
import numpy as np
import pytest

from dcmdp_jax.commands import probe
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.http import client as http_client
from dcmdp_jax.engines.protocol import (
    EngineError,
    SamplingParams,
    check_top_logprobs,
    unusable_completions,
)
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params
from tests.support.commands import run_command
from tests.support.sampling import local_engine, remote_engine, sample
from tests.support.vllm_tools import shared_memory_of
from tests.support.waiting import HANGS_S, wait_until

CONTEXT = 64
KEY = "key-that-no-one-may-see"

# The start below is that of the CPU build, which is the module `vllm` too.
needs_vllm = pytest.mark.usefixtures("vllm_is_installed")

# Read by every Python process of the server: none may outlive the one that started it (1 is
# PR_SET_PDEATHSIG), but for the one that then frees their shared memory and ends.
_SITE = """
import ctypes, signal, sys
if not any("resource_tracker" in argument for argument in sys.orig_argv):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
"""
# One server costs half a minute: its --logprobs-mode is changed instead of starting another.
_WORKER = """
import torch
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

class Switch:
    def use_logprobs_mode(self, mode):
        runner = self.model_runner
        for place in (runner.model_config, runner.sampler, runner.sampler.topk_topp_sampler):
            assert place.logprobs_mode
            place.logprobs_mode = mode
"""


@functools.cache
def _model():
    # vLLM's CPU attention wants heads of 32 or more.
    others = dict(rope_theta=1e4, max_position_embeddings=128, initializer_range=0.3)
    config = ModelConfig("qwen3", len(build_tokenizer()), 32, 64, 2, 4, 2, 32, **others)
    return config, init_params(config, jax.random.key(0))


class _Server:
    """The process group of a vLLM server."""

    def __init__(self, base):
        config, params = _model()
        build_tokenizer().save_pretrained(base / "tokenizer")
        save_params(
            params, config, base / "model", dtype="float32", tokenizer_dir=base / "tokenizer"
        )
        # A server that follows the checkpoint's own wishes, as one does by default, must not change
        # what we sample.
        wishes = {
            "eos_token_id": [2, 41],
            "temperature": 0.3,
            "top_k": 3,
            "top_p": 0.5,
            "repetition_penalty": 2.0,
        }
        (base / "model" / "generation_config.json").write_text(json.dumps(wishes))
        (base / "site").mkdir()
        (base / "site" / "sitecustomize.py").write_text(_SITE)
        (base / "site" / "logprobs_switch.py").write_text(_WORKER)
        self.socket = str(base / "vllm.sock")
        self._log = base / "log"
        self._gone = False
        arguments = (
            f"--uds {self.socket} --model {base / 'model'} --served-model-name tiny --dtype "
            f"float32 --enforce-eager --kv-cache-memory-bytes 268435456 --max-model-len {CONTEXT} "
            "--block-size 32 --no-enable-chunked-prefill --worker-extension-cls "
            "logprobs_switch.Switch"
        )
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("XLA_FLAGS", "JAX_PLATFORMS")
        }
        on = (
            "TORCHDYNAMO_DISABLE OMP_NUM_THREADS HF_HUB_OFFLINE VLLM_NO_USAGE_STATS "
            "VLLM_SERVER_DEV_MODE"
        )
        environment |= dict.fromkeys(on.split(), "1")
        environment |= {
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_API_KEY": KEY,
        }
        environment |= {"PYTHONPATH": str(base / "site"), "TMPDIR": str(base)}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments.split()],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=base,
            )

    def wait(self):
        wait_until(lambda: self._healthy() or self._process.poll() is not None, "vLLM's server")
        tail = self._log.read_text(errors="replace")[-1500:]
        assert self._process.poll() is None, (
            f"vLLM ended with {self._process.returncode}: ...{tail}"
        )

    def _healthy(self):
        # The socket is there half a minute before anyone listens.
        with contextlib.suppress(httpx.ConnectError):
            return self.get("/health").status_code == 200
        return False

    @contextlib.contextmanager
    def _client(self):
        transport = httpx.HTTPTransport(uds=self.socket)
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(
            base_url="http://vllm", transport=transport, headers=headers, timeout=HANGS_S
        ) as client:
            yield client

    def get(self, path):
        with self._client() as client:
            return client.get(path)

    def post(self, path, body):
        with self._client() as client:
            return client.post(path, json=body)

    @contextlib.contextmanager
    def mode(self, name):
        def switch(mode):
            body = {"method": "use_logprobs_mode", "args": [mode]}
            assert self.post("/collective_rpc", body).json() == {"results": [None]}

        switch(name)
        try:
            yield
        finally:
            switch("raw_logprobs")

    def requests(self):
        """Completions it was asked for so far, by its own log."""
        return self._log.read_text(errors="replace").count("POST /v1/completions")

    def kill(self):
        """Ends the server as a crash would; returns when every process of its group is gone."""
        shared = shared_memory_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        # Once it is gone, its number may become another's.
        if not self._gone:
            wait_until(lambda: not self._group_lives(), "the server's processes to end with it")
            self._gone = True
        # A crash of vLLM's own server leaves these; our tests don't.
        for path in shared:
            path.unlink(missing_ok=True)

    def _group_lives(self):
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True


@pytest.fixture(scope="module")
def vllm(reference):
    # Not tmp_path: the path of a Unix socket has room for 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="remote"))
    server = _Server(base)
    try:
        # LocalEngine compiles while vLLM starts.
        reference.score([_prompts()[0]], [_prompts()[1]], temperature=1.0)
        server.wait()
        yield server
    finally:
        server.kill()
        shutil.rmtree(base)


@pytest.fixture(scope="module")
def reference():
    config, params = _model()
    engine = local_engine(
        config, precision="exact", compute_dtype="float32", max_total_tokens=CONTEXT, max_rows=8
    )
    engine.sync_weights(params, 0)
    return engine


@pytest.fixture
def remote(vllm, monkeypatch):
    """Makes an engine on the server."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    def start(*, server=vllm.socket, max_total_tokens=CONTEXT, **settings):
        config, _ = _model()
        return remote_engine(config, server=server, max_total_tokens=max_total_tokens, **settings)

    return start


def _prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 104, length).astype(np.int32) for length in (1, 20, 7)]


def _largest_difference(left, right):
    assert [len(array) for array in left] == [len(array) for array in right]
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


SAMPLING = SamplingParams(group_size=6, max_completion_tokens=12, stop_token_ids=(66, 79))


@needs_vllm
def test_the_server_says_what_it_is(remote, vllm):
    engine = remote()
    assert (engine.server.model, engine.server.max_model_len) == ("tiny", 64)
    remote(server=f"unix:{vllm.socket}")
    with pytest.raises(ValueError) as refused:
        remote(max_total_tokens=65)
    assert str(refused.value) == (
        f"max_total_tokens: got 65, the server at {vllm.socket} has max_model_len=64; start it "
        "with --max-model-len 65 or more, or allow shorter completions"
    )
    with pytest.raises(EngineError) as refused:
        engine.sync_weights({}, 1)
    assert str(refused.value) == (
        f"sync_weights: the vLLM server at {vllm.socket} holds its own weights and takes no "
        "others; training needs an engine that does, such as vllm or local"
    )


@needs_vllm
def test_a_key_is_needed_and_never_shown(remote, vllm, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    sample(remote(), _prompts(), SAMPLING, seed=0, step=0)
    monkeypatch.setenv("VLLM_API_KEY", wrong := "wrong-key-of-mine")
    with pytest.raises(EngineError) as refused:
        remote(retries=0)
    assert str(refused.value) == (
        f'models: {vllm.socket} refused the request, HTTP 401: {{"error":"Unauthorized"}}; set VLLM_API_KEY to the '
        "server's key"
    )
    assert KEY not in caplog.text and wrong not in caplog.text
    monkeypatch.setenv("VLLM_API_KEY", "two\nlines-of-secret")
    with pytest.raises(ValueError, match="^VLLM_API_KEY: holds a character") as refused:
        remote()
    assert "secret" not in str(refused.value)


@needs_vllm
def test_score_is_that_of_the_same_weights(remote, reference):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 104, size).astype(np.int32) for size in (1, 5, 20, 33, 62)]
    completions = [rng.integers(0, 104, size).astype(np.int32) for size in (9, 1, 20, 30, 1)]
    scored = remote().score(prompts, completions, temperature=1.0)
    assert (
        _largest_difference(scored, reference.score(prompts, completions, temperature=1.0)) < 1e-4
    )
    # One position off, or the temperature of another, is nats away.
    assert _largest_difference(scored, reference.score(prompts, completions, temperature=0.7)) > 0.5
    assert all(array.dtype == np.float32 for array in scored)
    # As much as batching does to the rounding.
    assert (
        _largest_difference(remote(max_rows=1).score(prompts, completions, temperature=0), scored)
        < 1e-4
    )


@needs_vllm
def test_score_refuses_what_a_server_can_not_score(remote, vllm):
    engine = remote()
    ids = np.arange(32, dtype=np.int32)
    asked = vllm.requests()
    cases = {
        "temperature: got 0.7, a vLLM server scores at 1 (or 0, which means 1) alone": (
            [ids],
            [ids[:3]],
            0.7,
        ),
        "score: got 2 prompts and 1 completions": ([ids, ids], [ids], 1.0),
        "completion 0: shape (0,), must be a non-empty vector of token ids": (
            [ids],
            [ids[:0]],
            1.0,
        ),
        "prompt and completion 0: 67 tokens exceed max_total_tokens=64": (
            [np.resize(ids, 35)],
            [ids],
            1.0,
        ),
        "prompt and completion 1: 64 tokens, to be scored they must leave one of the server's "
        "max_model_len=64 free; start it with --max-model-len 65 or more": (
            [ids, ids],
            [ids[:3], ids],
            1.0,
        ),
    }
    for message, (prompts, completions, temperature) in cases.items():
        with pytest.raises(ValueError) as refused:
            engine.score(prompts, completions, temperature=temperature)
        assert str(refused.value) == message
    assert vllm.requests() == asked


@needs_vllm
def test_generated_tokens_have_the_log_probs_of_the_same_weights(remote, reference):
    prompts = _prompts()
    rollout = sample(remote(), prompts, SAMPLING, seed=1, step=2)
    assert rollout.group_ids.tolist() == [0] * 6 + [1] * 6 + [2] * 6 and rollout.policy_version == 0
    assert all(np.array_equal(ids, prompts[row // 6]) for row, ids in enumerate(rollout.prompt_ids))
    scored = reference.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0)
    assert _largest_difference(rollout.rollout_logprobs, scored) < 1e-4
    assert all(array.dtype == np.float32 for array in rollout.rollout_logprobs)
    # Full support: were top_k=3 of generation_config.json in force, no token could be less likely
    # than 3 others.
    assert min(array.min() for array in rollout.rollout_logprobs) < np.log(1 / 104)
    stopped = 0
    for ids, reason in zip(rollout.completion_ids, rollout.finish_reasons, strict=True):
        ends = np.isin(ids, SAMPLING.stop_token_ids)
        assert ids.dtype == np.int32 and not ends[:-1].any()
        assert reason == ("stop" if ends[-1] else "length") and (ends[-1] or ids.size == 12)
        stopped += reason == "stop"
    assert 0 < stopped < 18
    # The tokenizer's end of sequence (2) and that of generation_config.json (41) end nothing unless
    # they are asked to.
    long = sample(remote(), prompts, SamplingParams(16, 40), seed=0, step=0)
    assert set(long.finish_reasons) == {"length"} and {ids.size for ids in long.completion_ids} == {
        40
    }
    assert 41 in np.concatenate([ids[:-1] for ids in long.completion_ids])


@needs_vllm
def test_sampling_is_a_function_of_seed_step_and_row(remote):
    def tokens(prompts, *, seed=5, step=1, **settings):
        return [
            ids.tolist()
            for ids in sample(
                remote(**settings), prompts, SAMPLING, seed=seed, step=step
            ).completion_ids
        ]

    prompts = _prompts()
    first = tokens(prompts)
    assert tokens(prompts) == first and tokens(prompts, max_rows=7) == first
    assert tokens(prompts[:1]) == first[:6]
    # The same prompt at other rows draws other numbers.
    twice = tokens([prompts[0], prompts[0]])
    assert twice[:6] == first[:6] != twice[6:]
    # Two rows may both end at once; longer completions of different rows are never the same.
    longer = [tuple(ids) for ids in first if len(ids) > 2]
    assert len(set(longer)) == len(longer) > 9
    for other in (tokens(prompts, seed=6), tokens(prompts, step=2)):
        assert all(a != b for a, b in zip(first, other, strict=True) if len(a) > 2)


@needs_vllm
def test_the_server_takes_every_seed_that_we_may_send(vllm):
    body = {"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 2, "temperature": 1.0}
    for seed, status in ((0, 200), (2**63 - 1, 200), (2**63, 400)):
        assert vllm.post("/v1/completions", body | {"seed": seed}).status_code == status


@needs_vllm
def test_greedy_takes_the_top_k_token(remote, reference):
    sampling = SamplingParams(group_size=2, max_completion_tokens=12, temperature=0.0, top_p=0.5)
    rollout = sample(remote(), _prompts(), sampling, seed=0, step=0)
    expected = sample(reference, _prompts(), sampling, seed=0, step=0)
    assert [ids.tolist() for ids in rollout.completion_ids] == [
        ids.tolist() for ids in expected.completion_ids
    ]
    # By the protocol those of temperature 1.
    assert _largest_difference(rollout.rollout_logprobs, expected.rollout_logprobs) < 1e-4


@needs_vllm
def test_raw_log_probs_are_not_taken_for_those_of_another_temperature(remote, vllm, caplog):
    engine = remote()
    sampling = SamplingParams(group_size=4, max_completion_tokens=8, temperature=0.7)
    with caplog.at_level(logging.WARNING, logger="dcmdp_jax"):
        rollout = sample(engine, _prompts(), sampling, seed=0, step=0)
        sample(engine, _prompts(), sampling, seed=0, step=1)
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("dcmdp_jax")
    ] == [
        f"the vLLM server at {vllm.socket} was not seen to report log-probs of the distribution "
        "sampled from: the rollout's are NaN. Evaluation does without; for others start it with "
        "--logprobs-mode processed_logprobs"
    ]
    assert [array.size for array in rollout.rollout_logprobs] == [8] * 12
    assert all(
        np.isnan(array).all() and array.dtype == np.float32 for array in rollout.rollout_logprobs
    )
    with pytest.raises(EngineError):
        unusable_completions(rollout.episodes, drop=True)
    # The tokens are those of temperature 0.7: the same as when the log-probs are reported, and
    # others than at 1.
    with vllm.mode("processed_logprobs"):
        processed = sample(remote(), _prompts(), sampling, seed=0, step=0)
    tokens = [ids.tolist() for ids in rollout.completion_ids]
    assert tokens == [ids.tolist() for ids in processed.completion_ids]
    plain = sample(engine, _prompts(), SamplingParams(4, 8), seed=0, step=0)
    assert tokens != [ids.tolist() for ids in plain.completion_ids]
    assert np.isfinite(np.concatenate(plain.rollout_logprobs)).all()


@needs_vllm
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_processed_log_probs_are_those_sampled_from(remote, vllm, reference, temperature, caplog):
    sampling = SamplingParams(group_size=4, max_completion_tokens=8, temperature=temperature)
    with vllm.mode("processed_logprobs"):
        rollout = sample(remote(), _prompts(), sampling, seed=0, step=0)
    scored = reference.score(rollout.prompt_ids, rollout.completion_ids, temperature=temperature)
    assert _largest_difference(rollout.rollout_logprobs, scored) < 1e-4
    assert not [record for record in caplog.records if record.name.startswith("dcmdp_jax")]


@needs_vllm
def test_log_probs_below_top_p_1_are_those_of_the_nucleus(remote, vllm, reference):
    prompt = _prompts()[1]
    sampling = SamplingParams(group_size=24, max_completion_tokens=1, top_p=0.6)
    every = [np.array([token], np.int32) for token in range(104)]
    full = np.concatenate(reference.score([prompt] * 104, every, temperature=1.0)).astype(
        np.float64
    )
    # The nucleus: the top-k tokens until they hold 0.6, the one that crosses it included.
    order = np.argsort(-full)
    nucleus = order[: int(np.argmax(np.cumsum(np.exp(full[order])) >= 0.6)) + 1]
    expected = full - np.log(np.exp(full[nucleus]).sum())
    assert 1 < nucleus.size < 20
    with vllm.mode("processed_logprobs"):
        rollout = sample(remote(), [prompt], sampling, seed=0, step=0)
    drawn = np.concatenate(rollout.completion_ids)
    assert set(drawn) <= set(nucleus) and len(set(drawn)) > 1
    np.testing.assert_allclose(np.concatenate(rollout.rollout_logprobs), expected[drawn], atol=1e-4)
    assert np.isnan(
        np.concatenate(sample(remote(), [prompt], sampling, seed=0, step=0).rollout_logprobs)
    ).all()


@needs_vllm
def test_the_probe_splits_the_gap_of_a_server_in_its_legs(remote, vllm, tmp_path, capsys):
    """Both legs are float32's and add up to the gap, of the model that the server has.

    Without a weight sync.
    """
    model = Path(vllm.socket).parent / "model"
    server = f"--config.rollout.engine_args={json.dumps({'server': vllm.socket})}"
    code, _, errors = run_command(
        probe.main,
        "probe",
        capsys,
        f"--model={model}",
        "--a=http",
        server,
        "--config.task.train=arithmetic:difficulty=1,count=2,seed=0",
        "--no-rescoring",
        "--config.rollout.max_completion_tokens=8",
        "--config.rollout.group_size=4",
        f"--out={tmp_path}",
        # The server has room for 64 tokens.
        "--config.task.prompt_suffix=",
    )
    assert code == 0, errors
    [pair] = json.loads((tmp_path / "probe.json").read_text())["pairs"]
    decoding, one_pass = pair["evidence"]["legs"]
    assert decoding["log_ratio"] + one_pass["log_ratio"] == pytest.approx(
        pair["statistics"]["k1"], abs=1e-6
    )
    assert decoding["share"] + one_pass["share"] == pytest.approx(1, abs=1e-6)
    assert (
        pair["name"] == "http:float32 - trainer:float32" and 0 < pair["statistics"]["mean"] < 1e-4
    )


@needs_vllm
@pytest.mark.parametrize("top_k", [0, 4])
def test_the_top_k_tokens_are_those_of_the_distribution(remote, vllm, top_k):
    config, params = _model()
    local = local_engine(config, precision="exact", max_total_tokens=CONTEXT, top_logprobs=6)
    local.sync_weights(params, 0)
    sampling = SamplingParams(group_size=6, max_completion_tokens=8, temperature=0.7, top_k=top_k)
    with vllm.mode("processed_logprobs"):
        mine = collect(remote(top_logprobs=6).generate(_prompts(), sampling, seed=0, step=0))
    check_top_logprobs(mine, 6, config.vocab_size, complete=sampling.cuts)
    for a, b in zip(
        mine, collect(local.generate(_prompts(), sampling, seed=0, step=0)), strict=True
    ):
        first = a.prompt_length
        np.testing.assert_array_equal(a.columns["top_ids"][first], b.columns["top_ids"][first])
        np.testing.assert_allclose(
            a.columns["top_logprobs"][first], b.columns["top_logprobs"][first], atol=1e-4
        )
    outside = [
        (a.columns["top_ids"][a.sampled_mask] != a.completion_ids[:, None]).all(axis=1).any()
        for a in mine
    ]
    assert any(outside) == (top_k == 0)
    with pytest.raises(
        EngineError, match="was not seen to report .* which `top_logprobs` needs; start it with"
    ):
        list(remote(top_logprobs=6).generate(_prompts(), sampling, seed=0, step=0))


@needs_vllm
@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_not_taken_for_log_probs(remote, vllm, mode):
    advice = (
        "the server reports logits; start it with --logprobs-mode processed_logprobs or "
        "raw_logprobs$"
    )
    with vllm.mode(mode):
        for temperature, first in (
            (1.0, "generate: completion"),
            (0.7, "log-probs mode: measurement"),
        ):
            sampling = SamplingParams(4, 8, temperature=temperature)
            with pytest.raises(EngineError, match=f"^{first} [0-9]+: the answer of .*: {advice}"):
                sample(remote(), _prompts(), sampling, seed=0, step=0)
        with pytest.raises(
            EngineError, match=f"^score: completion 0: .* a log-prob is [0-9.]+: {advice}"
        ):
            # The likeliest token after another has a logit above 0.
            remote().score([_prompts()[0]], [np.arange(60, dtype=np.int32)], temperature=1.0)


@needs_vllm
def test_bad_input_is_refused_before_anything_is_sent(remote, vllm):
    engine = remote()
    ids = np.arange(10, dtype=np.int32)
    asked = vllm.requests()
    cases = {
        "prompts: got none, at least one is needed": [],
        "prompt 1: shape (0,), must be a non-empty vector of token ids": [ids, ids[:0]],
        "prompt 0: dtype float64, token ids must be integers": [ids / 1.0],
        "prompt 0: token id 104 is outside 0 .. 103": [ids + 95],
        "prompt 1: 53 tokens and max_completion_tokens=12 exceed max_total_tokens=64": [
            ids,
            np.resize(ids, 53),
        ],
    }
    for message, prompts in cases.items():
        with pytest.raises(ValueError) as refused:
            sample(engine, prompts, SAMPLING, seed=0, step=0)
        assert str(refused.value) == message
    for temperature in (0.001, 2.1):
        with pytest.raises(
            ValueError,
            match=f"^temperature: got {temperature}, http takes 0 .greedy. or 0.01 .. 2.0$",
        ):
            sample(engine, [ids], SamplingParams(1, 4, temperature=temperature), seed=0, step=0)
    for numbers, name in (((-1, 0), "seed"), ((0, 2**32), "step")):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            sample(engine, [ids], SAMPLING, seed=numbers[0], step=numbers[1])
    assert vllm.requests() == asked
    # The longest that fits is answered.
    rollout = sample(engine, [np.resize(ids, 52)], SAMPLING, seed=0, step=0)
    assert len(rollout.completion_ids) == 6 and vllm.requests() == asked + 6


@needs_vllm
def test_what_the_server_refuses_is_not_tried_again(remote, vllm, monkeypatch):
    engine = remote()
    engine.config = dataclasses.replace(engine.config, vocab_size=300)
    asked = vllm.requests()
    with pytest.raises(EngineError) as refused:
        sample(engine, [np.array([1, 200], np.int32)], SamplingParams(1, 4), seed=0, step=0)
    assert str(refused.value) == (
        f"generate: completion 0: {vllm.socket} refused the request, HTTP 400: Token id 200 is "
        "out of vocabulary"
    )
    assert vllm.requests() == asked + 1


@needs_vllm
def test_many_requests_keep_their_order(remote, reference):
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, 104, size).astype(np.int32) for size in rng.integers(17, 29, 40)]
    engine = remote(max_rows=17)
    rollout = sample(engine, prompts, SamplingParams(2, 3), seed=0, step=0)
    scored = reference.score(rollout.prompt_ids, rollout.completion_ids, temperature=1.0)
    assert _largest_difference(rollout.rollout_logprobs, scored) < 1e-4
    assert len(rollout.completion_ids) == 80 and sum(map(bool, rollout.pulled)) > 1
    engine.close()
    engine.close()


@needs_vllm
def test_a_server_that_dies_in_the_middle_of_a_call_is_one_line(remote, vllm, monkeypatch):
    """The last test with a server: it kills it."""
    engine = remote(retries=2)
    monkeypatch.setattr(http_client, "_FIRST_PAUSE_S", 0.05)
    with pytest.raises(EngineError) as dead:
        sample(
            engine,
            _prompts() * 60,
            SamplingParams(8, 40),
            seed=0,
            step=0,
            on_pull=lambda complete: vllm.kill(),
        )
    line = str(dead.value)
    assert line.startswith("generate: completion ") and "\n" not in line
    assert line.endswith(f", after 3 attempts; is the vLLM server at {vllm.socket} up and well?")
    with pytest.raises(
        EngineError, match="^health: ConnectError .*, after 1 attempt; is the vLLM server at"
    ):
        remote(retries=0)

"""`RemoteEngine` and `VllmHttpClient` against broken servers, and impossible settings."""

import contextlib
import http.server
import itertools
import json
import socket
import socketserver
import tempfile
import threading

import numpy as np
import pytest

from dcmdp_jax.data.episode import collect
from dcmdp_jax.engines.http import client as http_client
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.models.config import ModelConfig
from tests.support.sampling import remote_engine, sample
from tests.support.waiting import HANGS_S

CONFIG = ModelConfig("qwen3", 104, 32, 64, 2, 4, 2, 32)


class _Broken:
    """Stands for a server that is broken, never for vLLM.

    Attributes:
        spoil: changes a right answer to /v1/completions; may return bytes, (status, bytes), or
            wait.
        answers: of the other paths.
        asked: requests for completions.
    """

    daemon_threads = True

    def __init__(self, address):
        self.spoil = lambda answer: answer
        self.asked = 0
        self.answers = {
            "/health": {},
            "/version": {"version": "0.33.1"},
            "/v1/models": {"data": [{"id": "m", "parent": None, "max_model_len": 16}]},
        }
        super().__init__(address, _Handler)
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()


class _OnSocket(_Broken, socketserver.ThreadingUnixStreamServer):
    pass


class _OnPort(_Broken, socketserver.ThreadingTCPServer):
    pass


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._send(self.server.answers[self.path])

    def do_POST(self):
        self.server.asked += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = body["max_tokens"]
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": [5] * count,
            "finish_reason": "length",
            "logprobs": {
                "token_logprobs": [-0.5] * count,
                "top_logprobs": [{"token_id:1": -1.0, "token_id:2": -2.0}],
            },
            "prompt_logprobs": [None]
            + [{str(token): {"logprob": -0.25}} for token in body["prompt"][1:]],
        }
        self._send(self.server.spoil({"choices": [choice]}))

    def _send(self, answer):
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        with contextlib.suppress(BrokenPipeError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def broken(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(http_client, "_FIRST_PAUSE_S", 0.01)
    with (
        tempfile.TemporaryDirectory(prefix="broken") as directory,
        _OnSocket(f"{directory}/s") as server,
    ):
        yield server
        server.shutdown()


def _engine(broken, *, timeout_s=HANGS_S, retries=2, **settings):
    return remote_engine(
        CONFIG,
        server=broken.server_address,
        max_total_tokens=16,
        timeout_s=timeout_s,
        retries=retries,
        **settings,
    )


_PROMPT = np.array([1, 2], np.int32)


def _generate(engine, **sampling):
    return sample(engine, [_PROMPT], SamplingParams(1, 3, **sampling), seed=0, step=0)


def test_an_answer_that_is_not_spoilt_is_taken(broken):
    """The test's own eyes: what is refused below is refused for what was spoilt."""
    rollout = _generate(_engine(broken))
    assert (
        rollout.completion_ids[0].tolist() == [5, 5, 5]
        and rollout.rollout_logprobs[0].tolist() == [-0.5] * 3
    )
    assert _engine(broken).score([_PROMPT], [_PROMPT], temperature=1.0)[0].tolist() == [
        -0.25,
        -0.25,
    ]


@pytest.mark.parametrize("ending", ["", "/", "/v1"])
def test_a_url_does_as_well_as_a_socket(ending, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with _OnPort(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}{ending}"
        engine = remote_engine(CONFIG, server=url, max_total_tokens=16)
        assert _generate(engine).completion_ids[0].tolist() == [5, 5, 5]
        server.shutdown()


def _changed(**fields):
    def spoil(answer):
        answer["choices"][0] |= fields
        return answer

    return spoil


def _without(name):
    def spoil(answer):
        del answer["choices"][0][name]
        return answer

    return spoil


_LOGITS = (
    "the server reports logits; start it with --logprobs-mode processed_logprobs or raw_logprobs"
)
_WHY_ENDED = (
    "agrees with neither stop_token_ids nor the limit; start the server with "
    "--generation-config vllm"
)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_without("logprobs"), "no 'logprobs' in it"),
        (_without("token_ids"), "no 'token_ids' in it"),
        (_changed(logprobs=None), "'NoneType' object is not subscriptable"),
        (_changed(logprobs={"token_logprobs": [-1.0, -1.0]}), "2 log-probs for 3 tokens"),
        (
            _changed(logprobs={"token_logprobs": [-1.0, float("nan"), -1.0]}),
            "the log-prob of token 1 is nan, not finite",
        ),
        (
            _changed(logprobs={"token_logprobs": [-1.0, -1.0, -9999.0]}),
            "the log-prob of token 2 is -9999.0, not finite",
        ),
        (_changed(logprobs={"token_logprobs": [-1.0, 2.5, -1.0]}), f"a log-prob is 2.5: {_LOGITS}"),
        (_changed(token_ids=[5, 5, 104]), "token id 104 is outside 0 .. 103"),
        (_changed(token_ids=[5, "5", 5]), "token id '5' is outside 0 .. 103"),
        (_changed(token_ids=[5] * 4), "4 token_ids, must be 1 .. 3"),
        (_changed(token_ids=[]), "0 token_ids, must be 1 .. 3"),
        (
            _changed(token_ids=[5, 5]),
            f"finish_reason 'length' after 2 of 3 tokens, the last being 5, {_WHY_ENDED}",
        ),
        (
            _changed(finish_reason="stop"),
            f"finish_reason 'stop' after 3 of 3 tokens, the last being 5, {_WHY_ENDED}",
        ),
        (
            _changed(token_ids=[5, 9, 5]),
            f"finish_reason 'length' after 3 of 3 tokens, the last being 5, {_WHY_ENDED}",
        ),
        (
            _changed(token_ids=[5, 9]),
            f"finish_reason 'length' after 2 of 3 tokens, the last being 9, {_WHY_ENDED}",
        ),
        (_changed(prompt_token_ids=[1]), "its prompt_token_ids are not those sent"),
        (lambda answer: {"choices": []}, "not enough values to unpack (expected 1, got 0)"),
        (lambda answer: [], "list indices must be integers or slices, not str"),
    ],
)
def test_an_answer_that_can_not_be_right_is_refused(broken, spoil, said):
    engine = _engine(broken)
    broken.spoil = spoil
    with pytest.raises(EngineError) as refused:
        _generate(engine, stop_token_ids=(9,))
    assert (
        str(refused.value)
        == f"generate: completion 0: the answer of {broken.server_address} can't be used: {said}"
    )
    assert broken.asked == 1


def test_a_stop_token_ends_a_completion(broken):
    broken.spoil = _changed(
        token_ids=[5, 9], finish_reason="stop", logprobs={"token_logprobs": [-1.0, -2.0]}
    )
    rollout = _generate(_engine(broken), stop_token_ids=(9,))
    assert rollout.completion_ids[0].tolist() == [5, 9] and rollout.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_changed(prompt_logprobs=None), "object of type 'NoneType' has no len()"),
        (
            _changed(prompt_logprobs=[None, {"2": {"logprob": -1.0}}]),
            "2 prompt_logprobs for 4 tokens",
        ),
        (_changed(prompt_logprobs=[None] + [{"2": {"logprob": -1.0}}] * 3), "no '1' in it"),
    ],
)
def test_a_score_that_can_not_be_right_is_refused(broken, spoil, said):
    broken.spoil = spoil
    with pytest.raises(EngineError) as refused:
        _engine(broken).score([_PROMPT], [_PROMPT], temperature=1.0)
    assert (
        str(refused.value)
        == f"score: completion 0: the answer of {broken.server_address} can't be used: {said}"
    )


def test_an_answer_that_is_not_json(broken):
    engine = _engine(broken)
    broken.spoil = lambda answer: b"<html>\n  gateway"
    with pytest.raises(
        EngineError,
        match="^generate: completion 0: the server's answer is not JSON: '<html> gateway'$",
    ):
        _generate(engine)


def test_where_the_mode_can_not_be_told_log_probs_are_not_known(broken):
    # Two tokens as likely as one another stay so at every temperature.
    broken.spoil = _changed(
        logprobs={"token_logprobs": [-0.7] * 3, "top_logprobs": [{"a": -0.7, "b": -0.7}]}
    )
    engine = _engine(broken)
    for asked in (3, 6):
        assert np.isnan(_generate(engine, temperature=0.5).rollout_logprobs[0]).all()
        # Measured again, by two requests, each time.
        assert broken.asked == asked


def test_top_k_tokens_that_can_not_be_are_refused(broken):
    """The sampled token is listed beside the two likeliest where it is none of them.

    It is 5, at -0.5 nats.
    """

    def spoilt(entries, count=3):
        listed = [
            dict(zip(map("token_id:{}".format, ids), values, strict=True))
            for ids, values in entries
        ] * count
        broken.spoil = _changed(logprobs={"token_logprobs": [-0.5] * 3, "top_logprobs": listed})
        return collect(
            _engine(broken, top_logprobs=2).generate(
                [_PROMPT], SamplingParams(1, 3), seed=0, step=0
            )
        )

    [episode] = spoilt([((5, 1, 2), (-2.5, -0.2, -2.0))])
    assert episode.columns["top_ids"][episode.sampled_mask].tolist() == [[1, 2]] * 3
    assert episode.columns["top_logprobs"][-1].tolist() == pytest.approx([-0.2, -2.0])
    [episode] = spoilt([((5, 1), (-0.5, -9999.0))])
    assert episode.columns["top_ids"][episode.sampled_mask].tolist() == [[5, -1]] * 3
    for entries, count, said in (
        ([((1, 2), (-0.6, -2.0))], 3, "the top_logprobs of token 0 lack the sampled token 5"),
        ([((5, 1), (-0.5, -2.0))], 2, "2 top_logprobs for 3 tokens"),
    ):
        with pytest.raises(
            EngineError, match=f"^generate: completion 0: the answer of .* can't be used: {said}$"
        ):
            spoilt(entries, count)


def test_a_server_error_is_tried_again(broken):
    engine = _engine(broken)
    answers = iter([(500, b'{"error": {"message": "EngineCore\\n died"}}'), (503, b"")])
    broken.spoil = lambda answer: next(answers, answer)
    assert _generate(engine).completion_ids[0].tolist() == [5, 5, 5] and broken.asked == 3
    broken.spoil = lambda answer: (500, b'{"error": {"message": "EngineCore\\n died"}}')
    with pytest.raises(EngineError) as refused:
        _generate(engine)
    assert str(refused.value) == (
        "generate: completion 0: HTTP 500: EngineCore died, after 3 attempts; is the vLLM server "
        f"at {broken.server_address} up and well?"
    )
    assert broken.asked == 6


def test_a_server_that_hangs_runs_into_the_time_limit(broken):
    engine = _engine(broken, retries=1)
    # Only now: on a busy machine the questions of its start may take longer.
    engine.server.timeout_s = 0.3
    ended = threading.Event()
    broken.spoil = lambda answer: ended.wait(HANGS_S) and answer
    with pytest.raises(EngineError) as refused:
        _generate(engine)
    ended.set()
    assert broken.asked == 2
    assert str(refused.value) == (
        "generate: completion 0: no answer within 0.3 s (timeout_s=0.3), after 2 attempts; is "
        f"the vLLM server at {broken.server_address} up and well?"
    )


def test_the_first_failure_ends_the_others(broken):
    engine = _engine(broken, max_rows=4)
    lock = threading.Lock()
    turns = itertools.count()
    ended = threading.Event()

    def spoil(answer):
        with lock:
            turn = next(turns)
        return (400, b"no") if turn == 2 else ended.wait(HANGS_S) and answer

    broken.spoil = spoil
    with pytest.raises(EngineError, match="refused the request, HTTP 400: no$"):
        sample(engine, [_PROMPT] * 50, SamplingParams(1, 3), seed=0, step=0)
    ended.set()
    # Those in flight with the one that failed; none of the other 46 was sent.
    assert 3 <= broken.asked <= 4


@pytest.mark.parametrize(
    ("path", "answer", "kind", "said"),
    [
        (
            "/version",
            {"version": "0.31.9"},
            ValueError,
            "runs vLLM 0.31.9; its answers are known for 0.22, 0.32, ",
        ),
        (
            "/version",
            {"version": "0.34.0rc1"},
            ValueError,
            "runs vLLM 0.34.0rc1; its answers are known for 0.22, 0.",
        ),
        (
            "/version",
            {},
            ValueError,
            "runs vLLM of no version; its answers are known for 0.22, 0.32, 0.33: start one",
        ),
        (
            "/v1/models",
            {"data": []},
            EngineError,
            "names no model with a max_model_len at /v1/models",
        ),
        (
            "/v1/models",
            {"data": [{"id": "m"}]},
            EngineError,
            "names no model with a max_model_len at /v1/models",
        ),
    ],
)
def test_a_server_that_will_not_do(broken, path, answer, kind, said):
    broken.answers[path] = answer
    with pytest.raises(kind) as refused:
        _engine(broken)
    assert str(refused.value).startswith(
        f"server: {broken.server_address} {said}"
    ) and "\n" not in str(refused.value)


def test_an_unhealthy_server(broken):
    broken.answers["/health"] = (503, b"")
    with pytest.raises(
        EngineError,
        match="^health: HTTP 503: Service Unavailable, after 3 attempts; is the vLLM server",
    ):
        _engine(broken)


def test_a_dead_server(broken):
    with tempfile.TemporaryDirectory(prefix="broken") as directory:
        path = f"{directory}/dead"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
        broken.server_address = path
        with pytest.raises(
            EngineError, match="^health: ConnectError .*, after 3 attempts; is the vLLM server at"
        ):
            _engine(broken)
    # The "/v1" that other clients want is allowed.
    with pytest.raises(
        EngineError,
        match="^health: ConnectError .* is the vLLM server at http://127.0.0.1:9/v1/ up",
    ):
        remote_engine(CONFIG, server="http://127.0.0.1:9/v1/", max_total_tokens=16, retries=0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"server": "localhost:8000"},
            "server: got 'localhost:8000', must be http://host:port, https://host or unix:",
        ),
        ({"server": "http://"}, "server: got 'http://', must be http://host:port or https://host"),
        ({"server": "http://host:port"}, "server: got 'http://host:port', not a URL: "),
        (
            {"server": "http://me:secret@host"},
            "server: the URL must not hold a user or a password; set VLLM_API_KEY",
        ),
        (
            {"server": "unix:/no/such"},
            "server: /no/such is no Unix socket; start vLLM with --uds /no/such, or name",
        ),
        ({"server": "/tmp"}, "server: /tmp is no Unix socket; "),
    ],
)
def test_settings_out_of_range(settings, said):
    settings = {"server": "http://host", "max_total_tokens": 16} | settings
    with pytest.raises(ValueError) as refused:
        remote_engine(CONFIG, **settings)
    assert str(refused.value).startswith(said) and "secret" not in str(refused.value)

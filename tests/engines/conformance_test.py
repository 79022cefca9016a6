"""An engine chosen by its path trains, evaluates and is probed with no edit in the package."""

import dataclasses
import functools
import http.server
import json
import math
import threading

import numpy as np
import pytest

from dcmdp_jax.commands import evaluate, probe, train
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.config.checks import find_trainable
from dcmdp_jax.data.episode import COLUMNS, single_turn
from dcmdp_jax.engines.conformance import check_engine
from dcmdp_jax.engines.engine_kind import EngineKind
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.errors import EngineError, UserError
from tests.support.commands import run_command

ENGINE = "tests/engines/stub_engine.py:ENGINE"
_TASK = "arithmetic:difficulty=1,count=4,split=heldout"


class _Handler(http.server.BaseHTTPRequestHandler):
    """Samples evenly from the vocabulary, so that each log-prob is -log V."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        what = self.path.removeprefix("/")
        self.server.asked.append((what, asked))
        if what == "sample":
            words = np.random.default_rng(asked["row"])
            rows = words.integers(4, asked["vocabulary"], (asked["count"], 5)).tolist()
            answer = [(row, [-math.log(asked["vocabulary"])] * 5) for row in rows]
        elif what == "score":
            answer = [[-math.log(asked["vocabulary"])] * len(row) for row in asked["rows"]]
        else:
            answer = {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as found:
        found.asked = []
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def _run(main, capsys, *words):
    code, output, errors = run_command(main, "command", capsys, *words)
    assert code in (0, None), errors
    return output


def _settings(server):
    return json.dumps({"server": f"http://127.0.0.1:{server.server_port}", "buffer_mib": 512})


def test_it_trains_evaluates_and_is_probed(server, tmp_path, capsys):
    run = tmp_path / "run"
    command = [
        "--config=configs/demo.py:debug",
        f"--config.rollout.engine={ENGINE}",
        "--config.rollout.precision=float32",
        f"--config.rollout.engine_args={_settings(server)}",
        f"--config.run_dir={run}",
        "--config.training.steps=2",
        "--config.warmup.steps=0",
    ]
    planned = _run(train.main, capsys, *command, "--dry-run")
    [line] = [line for line in planned.splitlines() if "stub's buffer" in line]
    assert line.split()[-2:] == ["buffer", "512.00"] and not run.exists() and not server.asked
    trained = _run(train.main, capsys, *command)
    assert (run / "report.html").exists(), trained
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "reward/mean" in row] == [1, 2]
    # Weights went before each step's sampling, which asked for (seed, step, prompt) with G
    # completions each.
    synced = [fields["version"] for what, fields in server.asked if what == "weights"]
    assert synced[:2] == [0, 1]
    config = parse(["train", *command]).config
    rows = {tuple(fields["row"]) for what, fields in server.asked if what == "sample"}
    assert {row[2] for row in rows if row[1] == 0} >= set(range(config.training.prompts_per_step))

    server.asked.clear()
    out = tmp_path / "evaluation.json"
    asked = {"evaluation.task": _TASK, "evaluation.samples": 2, "rollout.max_completion_tokens": 8}
    words = [f"--config.{name}={value}" for name, value in asked.items()]
    _run(evaluate.main, capsys, run, *words, "--out", out)
    [result] = json.loads(out.read_text())["tasks"].values()
    assert result["length_mean"] == 5 and [what for what, _ in server.asked].count("sample") == 4

    server.asked.clear()
    asked = {"task.train": _TASK, "rollout.group_size": 2, "rollout.max_completion_tokens": 8}
    words = [f"--config.{name}={value}" for name, value in asked.items()] + [
        "--prompts",
        "2",
        "--no-rescoring",
    ]
    _run(
        probe.main,
        capsys,
        "--model",
        run,
        "--a",
        ENGINE,
        "--b",
        "trainer",
        *words,
        "--out",
        tmp_path / "probe",
    )
    [pair] = json.loads((tmp_path / "probe" / "probe.json").read_text())["pairs"]
    assert pair["statistics"]["tokens"] == 2 * 2 * 5
    assert pair["floors"][f"{ENGINE}:float32"] == 0  # it says -log V whatever else is in the batch
    assert ("weights" in {what for what, _ in server.asked}) and (
        "score" in {what for what, _ in server.asked}
    )


_FILE = """
import dataclasses
from dcmdp_jax.engines.engine_kind import EngineKind
{more}
class Kind(EngineKind):
    name = "x"
    {attribute}
ENGINE = Kind
"""


@pytest.mark.parametrize(
    ("more", "attribute", "said"),
    [
        (
            "import nothing_of_the_kind",
            "",
            "can't import PATH: ModuleNotFoundError: No module named 'nothing_of_the",
        ),
        ("1 / 0", "", "can't import PATH: ZeroDivisionError: division by zero (engine.py, line 4)"),
        (
            "EngineKind = dict",
            "",
            "PATH:ENGINE is <class 'user_file_engine.Kind'>, must be a "
            "dcmdp_jax.engines.engine_kind.En",
        ),
        ("", "build = None", "PATH:ENGINE: build=None, must be a method"),
        ("", "precisions = 'float32'", "PATH:ENGINE: precisions='float32', must be a tuple"),
        ("", "takes_weights = 'yes'", "PATH:ENGINE: takes_weights='yes', must be True or False"),
        ("", "settings = dict", "PATH:ENGINE: settings=<class 'dict'>, must be a data"),
        (
            "@dataclasses.dataclass\nclass Bare:\n    x: int = 1",
            "settings = Bare",
            "must be a dataclass whose fields are declared with dcmdp_jax.fields.setting",
        ),
    ],
)
def test_what_is_no_kind_of_engine_is_one_line(more, attribute, said, tmp_path):
    path = tmp_path / "engine.py"
    path.write_text(_FILE.format(more=more, attribute=attribute))
    with pytest.raises(UserError) as raised:
        find_trainable(f"{path}:ENGINE")
    line = str(raised.value)
    assert (
        line.startswith("config.rollout.engine: ")
        and said.replace("PATH", str(path)) in line
        and "\n" not in line
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "vlm",
            "got 'vlm', allowed are local, vllm, module:NAME and path.py:NAME; http, a server of "
            "yours, is for",
        ),
        ("http", "got 'http', allowed are local, vllm, module:NAME and path.py:NAME"),
        ("none.py:ENGINE", "none.py:ENGINE: no such file"),
        ("tests/engines/stub_engine.py:KIND", "stub_engine.py has no object 'KIND'; it has "),
        (
            "tests/engines/stub_engine.py:Settings",
            "Settings'>, must be a dcmdp_jax.engines.engine_kind.EngineKind",
        ),
    ],
)
def test_a_name_that_is_no_engine_is_one_line(name, said):
    with pytest.raises(UserError) as raised:
        find_trainable(name)
    assert str(raised.value).startswith("config.rollout.engine: ") and said in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"engine_args": "{}"},
            "config.rollout.engine_args.server: got '', must be http://HOST:PORT",
        ),
        ({"engine_args": "[1]"}, "config.rollout.engine_args: got '[1]', must be a JSON object"),
        ({"engine_args": "{"}, "config.rollout.engine_args: got '{', must be a JSON object ("),
        (
            {"engine_args": '{"sever": 1}'},
            "config.rollout.engine_args.sever: no setting of stub; did you mean 'se",
        ),
        (
            {"engine_args": '{"server": 1}'},
            "config.rollout.engine_args.server: got 1 (int), must be str",
        ),
        (
            {"engine_args": '{"buffer_mib": 0}'},
            "config.rollout.engine_args.buffer_mib: got 0, must be at least 1",
        ),
        ({"precision": "fp8"}, "config.rollout.precision: got 'fp8', allowed with rollout.engine="),
        (
            {"router_replay": "true"},
            "config.rollout.router_replay: got True, stub can't return experts",
        ),
        (
            {"engine": "local"},
            "config.rollout.engine_args: only valid for user-defined engines; local has "
            "config.roll",
        ),
    ],
)
def test_settings_that_do_not_fit_are_one_line_before_anything_runs(overrides, said):
    given = {
        "engine": ENGINE,
        "precision": "float32",
        "engine_args": '{"server": "http://127.0.0.1:1"}',
        **overrides,
    }
    with pytest.raises(UserError) as raised:
        parse(
            [
                "train",
                "--config=configs/demo.py",
                *(f"--config.rollout.{k}={v}" for k, v in given.items()),
            ]
        )
    assert str(raised.value).startswith(said) and "\n" not in str(raised.value)


_PROMPTS = [np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32)]
_SAMPLING = SamplingParams(group_size=1, max_completion_tokens=4)


def _episode(group=0, **changes):
    place = dict(policy_version=0, group=group, member=0, finish_reason="length")
    made = single_turn(
        _PROMPTS[group], np.array([7, 8], np.int32), np.array([-1, -2], np.float32), **place
    )
    columns = {
        name: changes.pop(name) for name in list(changes) if name in COLUMNS or name == "colors"
    }
    return dataclasses.replace(made, **changes).with_columns(**columns)


class _Engine:
    def __init__(self, groups=(), scores=()):
        self._groups = groups
        self._scores = scores

    def sync_weights(self, params, policy_version):
        return {}

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        yield from self._groups

    def score(self, prompts, completions, *, temperature):
        return self._scores

    def release_weights(self):
        pass

    def close(self):
        pass


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([[_episode()]], "generate gave nothing for 1 completion(s)"),
        ([[_episode()], [_episode()], [_episode(1)]], "generate gave a completion twice"),
        ([[_episode(group=0)], [3]], "generate gave int, must give lists of Episode"),
        (
            [[_episode(member=1)]],
            "completion 1 of prompt 0: asked were 2 prompts with 1 completions each",
        ),
        (
            [[_episode(rollout_logprobs=np.zeros(5))]],
            "rollout_logprobs is float64 (5,), must be float32 with an en",
        ),
        (
            [[_episode(rollout_logprobs=np.zeros(4, np.float32))]],
            "rollout_logprobs is float32 (4,), must be float3",
        ),
        (
            [[_episode(colors=np.zeros(5))]],
            "column 'colors' is none of rollout_logprobs, policy_versions, ",
        ),
        (
            [[_episode(token_ids=[1, 2])]],
            "token_ids is list, must be int32 with an entry for each of 2 tokens",
        ),
        (
            [[_episode(token_ids=np.array([0, 1, 2, 7, 50], np.int32))]],
            "token id 50 is outside 0 .. 49",
        ),
        (
            [[_episode(token_ids=np.array([0, 1, 3, 7, 5], np.int32))]],
            "token_ids must begin with the prompt",
        ),
    ],
)
def test_the_test_kit_checks_what_an_engine_returns(groups, said):
    with pytest.raises(EngineError) as raised:
        check_engine(_Engine(groups), {}, _PROMPTS, _SAMPLING, vocab_size=50)
    assert said in str(raised.value) and "\n" not in str(raised.value)


class _Sampler(_Engine):
    """Samples two tokens by (seed, step, row), each with log-prob -1; scored -1.25."""

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        for group, prompt in enumerate(prompts):
            ids = (
                np.random.default_rng((seed, step, first_prompt + group))
                .integers(0, 50, 2)
                .astype(np.int32)
            )
            place = dict(policy_version=0, group=group, member=0, finish_reason="length")
            yield [single_turn(prompt, ids, np.full(2, -1, np.float32), **place)]

    def score(self, prompts, completions, *, temperature):
        return [np.full(len(ids), -1.25, np.float32) for ids in completions]


def test_the_test_kit_finds_what_the_protocol_forbids():
    check = functools.partial(
        check_engine, params={}, prompts=_PROMPTS, sampling=_SAMPLING, vocab_size=50
    )
    assert check(_Sampler()) == 0.25

    class Forgetful(_Sampler):
        def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
            return super().generate(prompts, sampling, seed=seed + first_prompt, step=step)

    class Doubles(_Sampler):
        def score(self, prompts, completions, *, temperature):
            return [np.zeros(len(ids)) for ids in completions]

    for engine, said in (
        (
            Forgetful(),
            "is another one when its prompt is sampled in a smaller call with the same seed, step "
            "and row",
        ),
        (Doubles(), r"score of completion 0 is float64 \(2,\), must be float32 \(2,\)"),
        (
            type("Short", (_Sampler,), {"generate": lambda self, *given, **named: iter(())})(),
            "gave nothing for 2 comp",
        ),
    ):
        with pytest.raises(EngineError, match=said):
            check(engine)


def test_an_engine_without_the_protocol_is_refused_when_it_is_built():
    class Kind(EngineKind):
        name = "made"

        def build(self, arguments):
            return arguments

    with pytest.raises(
        UserError, match="^engine: made: build returned .* which has no method sync_weights"
    ):
        Kind().start(object())

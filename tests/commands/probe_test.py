"""The probe's command on recordings: table, JSON, PNGs, one page; bad input in one line."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.commands import parsers, probe
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.probe.columns.recording import Columns
from dcmdp_jax.probe.live import engines
from dcmdp_jax.probe.live.compare import Rescoring
from dcmdp_jax.run.saved_model import find_model
from tests.support.browser import CHROMIUM, look_at
from tests.support.commands import run_command
from tests.support.sampled_columns import columns
from tests.support.tiny_model import CONFIG, TOKENIZER, params

_RECORDED = Path(__file__).resolve().parents[1] / "recorded" / "frameworks"


def _write(path, pairs):
    bounds = np.cumsum(pairs.lengths)[:-1]
    cells = [
        np.split(x, bounds) for x in (pairs.token_ids, pairs.train_logprobs, pairs.rollout_logprobs)
    ]
    with path.open("w") as file:
        for ids, train, rollout in zip(*cells, strict=True):
            file.write(
                json.dumps(
                    {"token_ids": ids.tolist(), "old": train.tolist(), "<b>": rollout.tolist()}
                )
                + "\n"
            )


_run = functools.partial(run_command, probe.main, "probe")


def test_a_recording_gives_table_json_and_page(tmp_path, capsys):
    recording = tmp_path / "step <1>.jsonl"
    out = tmp_path / "out"
    _write(recording, columns(top_p=0.9))
    code, said, error = _run(
        capsys, recording, "--train-column", "old", "--rollout-column", "<b>", "--out", out
    )
    assert (code, error) == (0, "") and "truncated support" in said and "Mean p / q" in said
    (pair,) = json.loads((out / "probe.json").read_text())["pairs"]
    assert pair["findings"][0]["cause"] == "support" and pair["statistics"]["tokens"] == 1600
    # A mean over what was recorded, by hand.
    p, q = (
        np.exp(x.astype(float))
        for x in (columns(top_p=0.9).train_logprobs, columns(top_p=0.9).rollout_logprobs)
    )
    assert pair["statistics"]["mean"] == pytest.approx(np.abs(p - q).mean(), rel=1e-9)
    assert pair["recommendation"]["tolerance"] is None  # a defect is repaired, not bounded
    page = (out / "probe.html").read_text()
    assert "step &lt;1&gt;" in page and "engine: <b>" not in page
    # The names of SVG's namespaces are no requests; the scripts are the completions and what shows
    # them.
    assert not re.search(r"https?://|src=\"(?!data:)", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert page.count("<script") == 2
    assert page.count("<figure ") == len(list((out / "plots").glob("*.png"))) == 2


def test_the_page_has_each_completion_with_both_probabilities_the_largest_mismatch_first(
    tmp_path, capsys
):
    recording = tmp_path / "r.jsonl"
    out = tmp_path / "out"
    rows = [
        {"token_ids": [13], "old": [np.log(0.5)], "<b>": [np.log(0.5)]},
        {"token_ids": [11, 12], "old": list(np.log([0.5, 0.5])), "<b>": list(np.log([0.4, 0.9]))},
    ]
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, _ = _run(
        capsys, recording, "--train-column", "old", "--rollout-column", "<b>", "--out", out
    )
    page = (out / "probe.html").read_text()
    data = json.loads(
        re.search(r'<script type="application/json" id="completions">(.*?)</script>', page, re.S)[1]
    )
    first, second = data["rows"]
    assert code == 0 and [data["words"][word] for word in first["tokens"]] == [" 11", " 12"]
    assert (first["p"], first["q"]) == ([50_000, 50_000], [40_000, 90_000]) and first[
        "discrepancy"
    ] == 0.25
    # Of 0, 0.1 and 0.4 the 99% quantile, 0.98 of the way from 0.1 to 0.4: from there on a token has
    # the full color.
    assert data["full_color"] == pytest.approx(0.394) and second["discrepancy"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "give one of PATH (a recording), --model DIR and --config FILE"),
        (("R", "--model", "none"), "give one of"),
        (("--model", "none"), "MODEL none: no such directory"),
        (("--model", "tests"), "tests: "),
        (
            ("--model", "none", "--seed=1"),
            "--seed: no such argument; settings are given as --config.training.seed=",
        ),
        (("--model", "none", "--top_p=1"), "--top_p=1: no such argument; did you mean --top-p?"),
        (("R", "--config.training.seed=1"), "config.training.seed: a recording has no settings"),
        (("R", "--a=local:int8"), "--a: a recording has no engines to ask, leave it out"),
        (("R", "--prompts=4"), "--prompts: a recording has no engines to ask"),
        (("R", "--no-rescoring"), "--no-rescoring: a recording has no engines to ask"),
        (("R", "--earlier=/nonexistent"), "--earlier: a recording has no engines to ask"),
        (("--model", "none", "--a", "trainer"), "--a: trainer:float32 only scores"),
        (("--model", "none", "--a", "local:fp4"), "precision 'fp4', allowed are exact"),
        (("--model", "none", "--a", "local"), "MODEL none: no such directory"),
        (("R",), "no format knows it. old, <b> hold log-probs: name the training stack's by --"),
        (("R", "--rollout-column", "<b>"), "--train-column is missing"),
        (
            ("R", "R", "--train-column", "old", "--rollout-column", "<b>"),
            "2 paths with --train-column: give one file",
        ),
        (("R", "--format", "nemo"), "argument --format: invalid choice: 'nemo'"),
        (("none/*.jsonl",), "No such file or directory"),
        # Before anything is measured.
        (("--model", "none", "--a", "local", "--out", "R"), "argument --out: got '"),
        (
            ("R", "--token-column", ""),
            "--token-column is missing: name the column of the token ids",
        ),
        (
            ("R", "--train-column", "old", "--rollout-column", "<b>", "--token-column", "ids"),
            "no column 'ids' (--token-column); ",
        ),
        (
            ("R", "--train-column", "old", "--rollout-column", "new"),
            "no column 'new' (--rollout-column); ",
        ),
        (
            ("none.jsonl", "--train-column", "a", "--rollout-column", "b"),
            "No such file or directory",
        ),
        (
            ("R", "--train-column", "old", "--rollout-column", "<b>", "--tolerance", "0"),
            "must be in (0, 1]",
        ),
        (("R", "--tokenizr", "x"), "did you mean --tokenizer?"),
    ],
)
def test_bad_arguments_are_one_line(arguments, text, tmp_path, capsys):
    _write(tmp_path / "r.jsonl", columns())
    code, said, error = _run(
        capsys, *(tmp_path / "r.jsonl" if word == "R" else word for word in arguments)
    )
    assert code == 2 and said == "" and text in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model with the built-in task's tokenizer, as a Hugging Face directory; and one
    of other tokens.
    """
    root = tmp_path_factory.mktemp("models")
    save_tokenizer(TOKENIZER, root / "tokenizer", (TOKENIZER.eos_token_id,))
    save_params(params(), CONFIG, root / "model", dtype="float32", tokenizer_dir=root / "tokenizer")
    shutil.copytree(root / "model", root / "other")
    vocabulary = (root / "other" / "tokenizer.json").read_text()
    (root / "other" / "tokenizer.json").write_text(
        vocabulary.replace('"7":', '"~~":').replace('"8":', '"7":')
    )
    return root


_TASK = "--config.task.train=arithmetic:difficulty=1,count=8,seed=0"
_LIMIT = "--config.rollout.max_completion_tokens"
_ASK = (_TASK, "--prompts", "2", "--config.rollout.group_size=16")


def test_an_engine_is_compared_with_an_implementation_that_shares_no_code(model, tmp_path, capsys):
    pytest.importorskip("torch", reason="torch is in the development extra")
    ask = (*_ASK, f"{_LIMIT}=8", "--a", "local:exact", "--b", "hf", "--no-rescoring")
    code, said, shown = _run(capsys, "--model", model / "model", *ask, "--out", tmp_path)
    assert code == 0, shown
    (pair,) = json.loads((tmp_path / "probe.json").read_text())["pairs"]
    # transformers gives no entropies here, so that the tokens come from these distributions is not
    # checked.
    assert pair["findings"][0]["cause"] == "unchecked" and 0 < pair["statistics"]["mean"] < 1e-5
    assert (
        set(pair["floors"]) == {"local:exact", "hf:float32"}
        and "no mismatch between the two columns" in said
    )
    # A token's label is its id and, by the model's tokenizer, its text.
    assert all(
        re.fullmatch(r"\d+ ['\"].*['\"]", group["label"]) for group in pair["groups"]["token"]
    )


def test_engines_of_other_vocabularies_are_refused_in_one_line(model, tmp_path, capsys):
    code, said, error = _run(
        capsys,
        "--model",
        model / "model",
        *_ASK,
        "--a",
        f"local:exact,model={model / 'other'}",
        "--out",
        tmp_path,
    )
    assert code == 2 and said == "" and "vocabularies differ in" in error and error.count("\n") == 1
    assert not (tmp_path / "probe.html").exists()


def test_an_engine_that_can_not_run_here_is_left_out(model, tmp_path, capsys, monkeypatch):
    def refused(*_, **__):
        raise UserError("this processor has none")

    monkeypatch.setattr(engines, "build", refused)
    few = f"{_LIMIT}=8"
    code, _, error = _run(
        capsys, "--model", model / "model", *_ASK, few, "--a", "local:fp8", "--out", tmp_path
    )
    assert (
        code == 2
        and "local:fp8 left out: this processor has none" in error
        and "no pair could be measured" in error
    )


def test_a_second_engine_that_can_not_run_here_is_named(model, tmp_path, capsys, monkeypatch):
    build = engines.build

    def refused(spec, *arguments, **options):
        if spec.kind == "hf":
            raise UserError("this processor has none")
        return build(spec, *arguments, **options)

    monkeypatch.setattr(engines, "build", refused)
    engine_options = ("--a", "local:exact", "--b", "hf", "--out", tmp_path)
    code, _, error = _run(capsys, "--model", model / "model", *_ASK, f"{_LIMIT}=8", *engine_options)
    assert code == 2
    # Without the second name the reason would be the first engine's.
    assert "local:exact left out: hf:float32 did not start: this processor has none" in error


def test_scoring_again_stops_at_the_change_that_explains_the_mismatch(model, tmp_path, capsys):
    arguments = (
        "--model",
        model / "model",
        *_ASK,
        f"{_LIMIT}=8",
        "--a",
        "local:fp8",
        "--out",
        tmp_path,
    )
    code, _, shown = _run(capsys, *arguments)
    assert code == 0, shown
    record = json.loads((tmp_path / "probe.json").read_text())
    evidence = record["pairs"][0]["evidence"]
    names = [one["name"].split(",")[0] for one in evidence["explanations"]]
    assert (
        names == ["the model in float32", "int8 weights", "int4 weights", "fp8 weights"]
        and record["finished"]
    )
    # The same weights in another program: what is left is float32's rounding. No engine without the
    # setting is built.
    assert evidence["explanations"][-1]["share"] > 0.999 and evidence["lifted"] == []
    # Three bits of a mantissa put each product of a layer off by some percent; its norms are not
    # touched.
    operators = {(one["operator"], one["layer"]): one["relative"] for one in evidence["operators"]}
    assert operators["mlp", 1] > 100 * operators["norm", 1]


def test_a_probe_that_is_stopped_leaves_what_it_had(model, tmp_path, capsys, monkeypatch):
    # The tokens that a nucleus leaves out are explained by no change, so that all are tried.
    arguments = (
        "--model",
        model / "model",
        *_ASK,
        f"{_LIMIT}=8",
        "--a",
        "local",
        "--top-p=0.6",
        "--out",
        tmp_path,
    )

    def stopped(self):
        raise EngineError("stopped here")

    with monkeypatch.context() as patched:
        patched.setattr(Rescoring, "_temperature", stopped)
        code, _, error = _run(capsys, *arguments)
    record = json.loads((tmp_path / "probe.json").read_text())
    (pair,) = record["pairs"]
    assert (
        code != 0
        and "stopped here" in error
        and not record["finished"]
        and pair["statistics"]["mean"] > 0.01
    )
    assert len(pair["evidence"]["explanations"]) == 6 and not (tmp_path / "probe.html").exists()
    assert _run(capsys, *arguments)[0] == 0
    assert json.loads((tmp_path / "probe.json").read_text())["finished"]


def test_a_model_of_the_hub_takes_the_place_of_a_directory(model, monkeypatch, capsys, tmp_path):
    """As `model.path`, for the probe and for an evaluation, which is named after it."""
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, *, revision, allow_patterns: (
            asked.append((name, revision)) or str(model / "model")
        ),
    )
    model_directory.cache_clear()
    code, said, error = _run(
        capsys,
        "--model",
        "some/one@v2",
        *_ASK,
        "--a",
        "local",
        f"{_LIMIT}=4",
        "--out",
        tmp_path,
    )
    assert code == 0, error
    found = find_model(Path("some/other"))
    assert asked == [("some/one", "v2"), ("some/other", None)] and found.name == "other"
    model_directory.cache_clear()


def test_every_column_that_can_be_missing_is_told_as_an_option_that_exists():
    names = [field.name for field in dataclasses.fields(Columns)]
    options = Columns(**dict.fromkeys(names, "x")).options()
    for option in options:
        assert vars(parsers.probe().parse_args([option, "y"]))[option[2:].replace("-", "_")] == "y"
    assert len(options) == len(names)


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_completions_of_a_probe(tmp_path, capsys, width):
    code, _, error = _run(capsys, _RECORDED / "nemo_rl", "--out", tmp_path / "out")
    assert code == 0, error
    count = "d.getElementById('count').textContent"
    summary = "d.querySelector('table').scrollWidth"
    facts, console = look_at(
        tmp_path / "out" / "probe.html", tmp_path, width, more=f"[{count}, {summary}]"
    )
    counted, summary_width = facts["more"]
    assert console == []
    # 20 at a time, of 40 that were recorded.
    assert facts["shown"] == 20
    assert counted == "40 of 40 completions"
    assert facts["wide"] <= width
    # The table of likely causes needs no scrolling.
    assert summary_width <= width

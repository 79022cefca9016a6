"""`python -m bin.evaluate` with a model whose every answer is known: its output layer is a table of
next tokens.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from configs.base import get_config
from dcmdp_jax.algorithm.dual import dual_init
from dcmdp_jax.commands import evaluate
from dcmdp_jax.commands.evaluate import main
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import to_dict
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run import evaluation_setup, memory_use, saved_model
from dcmdp_jax.run.checkpoint import Checkpoints
from dcmdp_jax.training.state import new_state
from tests.support.coin_model import (
    ROWS,
    SAMPLES,
    SEED,
    TASK,
    TEMPERATURE,
    TOKENS,
    coin_model,
    coin_params,
    evaluation_fails,
    save_coin,
)
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]
_BENCHMARKS = _ROOT.parent / "shared" / "data" / "benchmarks"


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """Answers 4 or 7, each with probability 1/2."""
    return save_coin(tmp_path_factory.mktemp("hf"))


@pytest.fixture
def tasks(tmp_path):
    """Three problems with the answers 4, 7 and 9."""
    path = tmp_path / "three.jsonl"
    rows = [{"problem": f"p{answer}", "answer": answer} for answer in ("4", "7", "9")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with checkpoints of step 1 (always 4) and step 2 (always 7)."""
    base = tmp_path_factory.mktemp("runs")
    path = base / "demo"
    (base / "held.jsonl").write_text('{"problem": "p", "answer": "7"}\n')
    config = get_config("debug")
    config.run_dir = str(path)
    config.task.prompt_suffix = " Go."
    config.rollout.precision = "int8"
    config.rollout.compute_dtype = "float32"
    config.evaluation.task = str(base / "held.jsonl")
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_dict(from_config_dict(config))))
    build_tokenizer().save_pretrained(path / "tokenizer")
    checkpoints = Checkpoints(path, keep_last=2, keep_best=0)
    for step, digit in ((1, "4"), (2, "7")):
        dual = dual_init(0.1, tolerance=0.01)
        state = new_state(coin_params(coin_model(64), digit), optax.sgd(0.1), dual)
        checkpoints.save(step, state, model=coin_model(64))
    checkpoints.close()
    return path


def _evaluate(out, *argv):
    main(["evaluate", *map(str, argv), "--out", str(out)])
    return json.loads(out.read_text())


def test_greedy_scores_are_exact(hf_dir, tasks, tmp_path, capsys):
    # The tie between 4 and 7 goes to the lower token id, 4: right on the first problem alone, every
    # time.
    record = _evaluate(
        tmp_path / "out.json",
        hf_dir,
        TASK,
        tasks,
        TEMPERATURE,
        0,
        SAMPLES,
        3,
        TOKENS,
        6,
        "--method",
        "coin, greedy",
    )
    scores = record["tasks"]["three"]
    assert scores["problem_averages"] == [1.0, 0.0, 0.0] and scores["problem_rows"] == [0, 1, 2]
    assert scores["pass_at_k"] == pytest.approx(1 / 3) and scores["samples"] == 3
    assert scores["length_mean"] == 4.0 and scores["truncated_fraction"] == 0.0
    output = capsys.readouterr()
    assert [cell.strip() for cell in output.out.splitlines()[2].split("|")] == [
        "coin, greedy",
        "33.3",
        "33.3",
    ]
    assert output.out.splitlines()[-1] == f"wrote {tmp_path / 'out.json'}"
    progress, shares, wrong = output.err.splitlines()
    assert progress.startswith("[1/1] three: avg@3 33.3, 3 problems, 9 completions, ")
    assert shares == "three: 0.0% without an answer, 0.0% cut"
    assert wrong.startswith("  wrong: ") and wrong.endswith("; read as '4'; reference '7'")
    lines = [
        json.loads(line) for line in (tmp_path / "out.problems.jsonl").read_text().splitlines()
    ]
    four, seven, nine = lines[1:4]
    assert (seven["answer"], seven["found"], seven["scores"]) == ("7", ["4"] * 3, [0, 0, 0])
    assert "4" in four["completions"][0]


def test_sampled_scores_follow_the_models_probabilities_and_the_seed(hf_dir, tasks, tmp_path):
    options = (TASK, tasks, SAMPLES, 64, TOKENS, 6)
    record = _evaluate(tmp_path / "out.json", hf_dir, *options)
    four, seven, nine = record["tasks"]["three"]["problem_averages"]
    # Five standard deviations of 64 fair coins are 0.3125.
    assert abs(four - 0.5) < 0.32 and abs(seven - 0.5) < 0.32 and nine == 0.0
    assert record["tasks"]["three"]["pass_at_k"] == pytest.approx(2 / 3)
    assert _evaluate(tmp_path / "again.json", hf_dir, *options) == record
    other = _evaluate(tmp_path / "other.json", hf_dir, *options, SEED, 1)
    assert (
        other["tasks"]["three"]["problem_averages"] != record["tasks"]["three"]["problem_averages"]
    )


def test_the_length_limit_counts_the_end_token(hf_dir, tasks, tmp_path):
    options = (TASK, tasks, SAMPLES, 1, TEMPERATURE, 0)
    enough = _evaluate(tmp_path / "a.json", hf_dir, *options, TOKENS, 4)["tasks"]["three"]
    short = _evaluate(tmp_path / "b.json", hf_dir, *options, TOKENS, 3)["tasks"]["three"]
    assert (enough["truncated_fraction"], enough["length_mean"]) == (0.0, 4.0)
    assert (short["truncated_fraction"], short["length_mean"]) == (1.0, 3.0)
    assert short["average"] == enough["average"]  # the box was closed before the limit


def test_problems_can_be_limited_and_long_prompts_left_out(hf_dir, tmp_path, capsys):
    # The template adds 8 tokens, the suffix none: 8 + 2, 8 + 12 and 8 + 2.
    rows = [{"problem": text, "answer": "4"} for text in ("p1", "p2 and longer", "p3", "p4")]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = ("--config.task.max_prompt_tokens", 10, "--config.task.prompt_suffix", "")
    limits = ("--config.evaluation.max_problems", 3, TOKENS, 4, SAMPLES, 1)
    record = _evaluate(tmp_path / "out.json", hf_dir, TASK, path, *limits, *prompts)
    assert (
        record["tasks"]["mixed"]["problem_rows"] == [0, 2]
        and record["tasks"]["mixed"]["dropped_prompts"] == 1
    )
    assert "left out, prompt over task.max_prompt_tokens: 1 of mixed" in capsys.readouterr().out


def test_a_run_gives_its_newest_checkpoint_its_task_suffix_and_precision(run_dir, tmp_path):
    record = _evaluate(tmp_path / "out.json", run_dir, TOKENS, 4)
    assert (record["model"], record["step"]) == ("demo step 2", 2)
    assert (
        record["tasks"]["held"]["problem_averages"] == [1.0]
        and record["tasks"]["held"]["samples"] == 8
    )
    settings = record["settings"]
    assert (settings["task.prompt_suffix"], settings["rollout.precision"]) == (" Go.", "int8")
    assert (settings["evaluation.temperature"], settings["top_p"]) == (0.7, 1.0)


@pytest.mark.parametrize(
    ("arguments", "asked", "said"),
    [
        (
            (),
            (4, 0.5, 0.9, 2, (3,), 1, 30),
            "at most 4 tokens, temperature 0.5, top_p 0.9, top_k 2: the run's where",
        ),
        (
            (TEMPERATURE, 0, "--top-p", 1),
            (4, 0, 1, 2, (3,), 1, 30),
            "at most 4 tokens, temperature 0, top_p 1, top_k",
        ),
        ((TOKENS, 3), (3, 0.5, 0.9, 2, (3,), 1, 30), "at most 3 tokens, temperature 0.5"),
        # Another task than the run's is asked whole.
        (
            (TASK, "{tasks}", SAMPLES, 2),
            (4, 0.5, 0.9, 2, (2,), 0, 2**20),
            "at most 4 tokens, temperature 0.5",
        ),
    ],
)
def test_a_run_is_asked_as_by_its_own_held_out_evaluations(
    run_dir, tasks, tmp_path, capsys, arguments, asked, said
):
    shutil.copytree(run_dir, tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["rollout"] |= {"max_completion_tokens": 4, "top_p": 0.9, "top_k": 2}
    config["evaluation"] |= {"temperature": 0.5, "samples": [3], "max_problems": 1}
    config["task"]["max_prompt_tokens"] = 30
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    given = [str(word).format(tasks=tasks) for word in arguments]
    drawn = []
    evaluate_with = evaluate.evaluate

    def note(services, prompts, sampling, **options):
        drawn.append(sampling)
        return evaluate_with(services, prompts, sampling, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "evaluate", note)
        settings = _evaluate(tmp_path / "out.json", tmp_path / "run", *given)["settings"]
    *_, samples, problems, prompt = asked
    [sampling] = drawn
    assert (
        sampling.max_completion_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
    ) == asked[:4]
    assert sampling.group_size == samples[0]
    assert (settings["evaluation.max_problems"], settings["task.max_prompt_tokens"]) == (
        problems,
        prompt,
    )
    assert said in capsys.readouterr().out


def test_a_model_is_asked_as_in_the_paper(hf_dir, tasks, tmp_path, capsys):
    settings = _evaluate(tmp_path / "out.json", hf_dir, TASK, tasks, SAMPLES, 1, TOKENS, 5)[
        "settings"
    ]
    assert (settings["evaluation.temperature"], settings["top_p"], settings["rollout.top_k"]) == (
        0.7,
        1.0,
        0,
    )
    said = (
        "at most 5 tokens, temperature 0.7, top_p 1, top_k 0: the paper's where they are not given"
    )
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("how", ["--step", "directory"])
def test_an_older_checkpoint_can_be_chosen(run_dir, tmp_path, how):
    where = (run_dir, "--step", 1) if how == "--step" else (run_dir / "checkpoints" / "1",)
    record = _evaluate(tmp_path / "out.json", *where, TOKENS, 4)
    assert record["step"] == 1 and record["tasks"]["held"]["average"] == 0.0  # it answers 4, not 7


def test_without_out_a_run_keeps_every_evaluation(run_dir):
    for name in ("evaluation-2.json", "evaluation-2-2.json"):
        main(["evaluate", str(run_dir), TOKENS, "4", SAMPLES, "1"])
        assert json.loads((run_dir / name).read_text())["average"] == 1.0
    assert not list(run_dir.glob(".evaluation*"))


@pytest.mark.skipif(
    not _BENCHMARKS.is_dir(), reason="the benchmark files are not beside this checkout"
)
def test_the_six_benchmarks_with_the_papers_k(tmp_path, capsys, monkeypatch):
    # Six shapes compile several times faster for one device.
    monkeypatch.setattr(
        evaluation_setup, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1])
    )
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = coin_model(4096)
    save_params(
        coin_params(model, "4"),
        model,
        tmp_path / "m",
        dtype="bfloat16",
        tokenizer_dir=tmp_path / "tokenizer",
    )
    names = ["olympiadbench", "minerva", "math500", "amc23", "aime25", "aime24"]
    files = ",".join(str(_BENCHMARKS / f"{name}.jsonl") for name in names)
    # Few rows at a time: one shape for K = 32 and K = 4.
    record = _evaluate(
        tmp_path / "out.json",
        tmp_path / "m",
        TASK,
        files,
        "--config.evaluation.max_problems",
        1,
        TOKENS,
        4,
        ROWS,
        4,
    )
    samples = {name: record["tasks"][name]["samples"] for name in names}
    assert samples == dict.fromkeys(("aime24", "aime25", "amc23"), 32) | dict.fromkeys(
        ("math500", "minerva", "olympiadbench"), 4
    )
    heading = capsys.readouterr().out.splitlines()[0]
    heads = [cell.strip() for cell in heading.split("|")]
    assert heads == "Method AIME24 AIME25 AMC23 MATH-500 Minerva Olympiad Avg".split()


@pytest.mark.long
@pytest.mark.skipif(
    not _BENCHMARKS.is_dir(), reason="the benchmark files are not beside this checkout"
)
def test_every_row_of_the_six_benchmarks_is_answered_and_graded(
    tmp_path, monkeypatch, record_property
):
    """A tiny policy that always says 4, once for each problem: right where the file's answer is 4,
    or 4 degrees.
    """
    monkeypatch.setattr(
        evaluation_setup, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1])
    )
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = coin_model(8192)
    save_params(
        coin_params(model, "4"),
        model,
        tmp_path / "m",
        dtype="float32",
        tokenizer_dir=tmp_path / "tokenizer",
    )
    names = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]
    files = {name: _BENCHMARKS / f"{name}.jsonl" for name in names}
    words = (
        tmp_path / "m",
        TASK,
        ",".join(map(str, files.values())),
        SAMPLES,
        1,
        TOKENS,
        4,
        ROWS,
        16,
    )
    record = _evaluate(tmp_path / "out.json", *words)
    # As a kill leaves it, in the middle of a part; what is continued ends with the same bytes.
    whole = (tmp_path / "out.problems.jsonl").read_bytes()
    (tmp_path / "cut.problems.jsonl").write_bytes(whole[: 3 * len(whole) // 4])
    assert _evaluate(tmp_path / "cut.json", *words) == record
    assert (tmp_path / "cut.problems.jsonl").read_bytes() == whole
    for name, path in files.items():
        answers = [
            _raw_answer(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        scores = record["tasks"][name]
        assert (scores["problems"], scores["samples"], scores["dropped_prompts"]) == (
            len(answers),
            1,
            0,
        )
        assert scores["problem_averages"] == [
            float(answer in ("4", r"4^{\circ}")) for answer in answers
        ]
        assert (scores["verifier_timeouts"], scores["verifier_errors"]) == (0, 0)
        record_property(name, f"{len(answers)} rows, {answers.count('4')} right")


def _raw_answer(row):
    """A published row's answer as text, without a dollar sign, a unit or a decimal point that is
    nothing.
    """
    if "final_answer" in row:
        text = ",".join(row["final_answer"])
    elif "answer" in row:
        text = str(row["answer"])
    else:
        # Minerva: what is in the last box of the solution.
        text = row["solution"].rpartition(r"\boxed{")[2].partition("}")[0]
    return text.strip("$ ").removesuffix(".0")


def test_an_arithmetic_task_keeps_its_commas(hf_dir, tmp_path, tasks):
    arithmetic = "arithmetic:difficulty=1,count=3,split=heldout"
    record = _evaluate(
        tmp_path / "out.json", hf_dir, TASK, f"{arithmetic},{tasks}", TOKENS, 4, SAMPLES, 1
    )
    assert {name: task["problems"] for name, task in record["tasks"].items()} == {
        "arithmetic": 3,
        "three": 3,
    }


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--stepp", "4"), "--stepp: no such argument; did you mean --step?"),
        (
            ("--config.rollout.precison", "4"),
            "config.rollout.precison: no such setting; did you mean 'rollout.precision'?",
        ),
        (
            ("--precision=fp8",),
            "--precision: no such argument; settings are given as --config.rollout.precision=VALUE",
        ),
        ((SAMPLES, "many"), "config.evaluation.samples: got 'many', must be"),
        ((SAMPLES, "0"), "config.evaluation.samples: got 0, must be at least 1"),
        ((SEED, "-1"), "config.training.seed: got -1, must be"),
        (
            (SAMPLES, "1000000000"),
            "config.evaluation.samples: got 1000000000, must be at most 4096",
        ),
        ((ROWS, "1000000000"), "config.rollout.max_rows: got 1000000000, "),
        (("--step", "-1"), "argument --step: got -1, must be at least 0"),
        ((TEMPERATURE, "warm"), "config.evaluation.temperature: got 'warm', must be"),
        ((TEMPERATURE, "nan"), "config.evaluation.temperature: got nan, must be"),
        (
            (TEMPERATURE, "1e-30"),
            "config.evaluation.temperature: got 1e-30, must be 0 (greedy) or at least 0.01",
        ),
        ((TEMPERATURE, "1e30"), "config.evaluation.temperature: got 1e+30, must be"),
        (("--top-p", "0"), "argument --top-p: got 0, must be in (0, 1]"),
        (("--top-p", "nan"), "argument --top-p: got nan, must be in (0, 1]"),
        (
            ("--config.rollout.precision=fp9",),
            "config.rollout.precision: got 'fp9', allowed with rollout.engine=local",
        ),
        (
            ("--config.rollout.engine=vllm", "--config.rollout.precision=exact"),
            "config.rollout.precision: got 'exact', allowed with rollout.engine=vllm are float32,",
        ),
        (
            ("--config.rollout.engine=http",),
            "config.rollout.engine_args.server: empty; give the engine's server",
        ),
        (
            ("--config.rollout.engine=htp",),
            "config.rollout.engine: got 'htp', allowed are local, vllm, http, module:NAME and "
            "path.py:NAME; did you",
        ),
        (
            ("--config.rollout.engine_args=[]",),
            "config.rollout.engine_args: only valid for user-defined engines; ",
        ),
        (
            (
                "--config.rollout.engine=http",
                '--config.rollout.engine_args={{"server": "{tmp}/none"}}',
            ),
            "config.rollout.engine_args.server: {tmp}/none is no Unix socket",
        ),
        (
            ("--step", "3"),
            "--step: got 3, but {hf} is no run directory; only a run's checkpoints have steps",
        ),
        ((TASK, "{tmp}/none.jsonl"), "config.evaluation.task: data {tmp}/none.jsonl: no such file"),
        (
            (TASK, "a/x.jsonl,b/x.jsonl"),
            "config.evaluation.task: two tasks are called 'x'; rename one",
        ),
        (
            (TASK, "a.jsonl,,b.jsonl"),
            "config.evaluation.task: got 'a.jsonl,,b.jsonl', an empty name is no task",
        ),
        (("--overlap=report",), "--overlap: goes with config.task.train"),
        (("--out", "{tmp}"), "--out: {tmp} can't be written; name a file in a directory"),
        (("--out", "{tmp}/no/o.json"), "--out: {tmp}/no/o.json can't be written; name a file"),
    ],
)
def test_bad_arguments_are_one_line_before_any_weight_is_read(
    hf_dir, tasks, tmp_path, capsys, monkeypatch, argv, line
):
    monkeypatch.setattr(
        saved_model, "load_params", lambda *_, **__: pytest.fail("the weights were read")
    )
    places = {"tmp": tmp_path, "hf": hf_dir}
    given = [word.format(**places) for word in argv]
    got = evaluation_fails(capsys, hf_dir, TASK, tasks, TOKENS, 4, *given)
    assert got.startswith(line.format(**places))


def test_a_length_that_does_not_fit_names_the_one_that_does(hf_dir, tasks, capsys, monkeypatch):
    monkeypatch.setattr(
        saved_model, "load_params", lambda *_, **__: pytest.fail("the weights were read")
    )
    # 8 tokens of template, 2 of the problem: 256 - 10.
    assert evaluation_fails(capsys, hf_dir, TASK, tasks, "--config.task.prompt_suffix", "") == (
        "config.rollout.max_completion_tokens: got 32768, with the longest prompt (10 tokens, "
        "three) more than the model's max_position_embeddings=256; at most 246 fit, and a smaller "
        "task.max_prompt_tokens leaves long prompts out"
    )
    said = evaluation_fails(capsys, hf_dir, TASK, tasks, "--config.task.prompt_suffix", "x" * 300)
    assert "at most 0 fit" in said


def test_bad_files_are_named(hf_dir, tasks, tmp_path, capsys):
    with tasks.open("a") as file:
        file.write('{"problem": "p", "answer": ""}\n')
    assert evaluation_fails(capsys, hf_dir, TASK, tasks).startswith(
        f"config.evaluation.task: {tasks}:4: "
    )
    assert (
        evaluation_fails(capsys, tmp_path / "nothing", TASK, tasks)
        == f"MODEL {tmp_path}/nothing: no such directory"
    )
    assert "no config.json" in evaluation_fails(capsys, tmp_path, TASK, tasks)
    assert evaluation_fails(capsys, hf_dir).startswith("config.evaluation.task: empty; for example")


def test_a_directory_without_a_tensor_or_a_chat_template_is_refused(
    hf_dir, tasks, tmp_path, capsys
):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in hf_dir.iterdir():
        if path.name != "chat_template.jinja":
            (broken / path.name).write_bytes(path.read_bytes())
    fields = json.loads((broken / "tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    (broken / "tokenizer_config.json").write_text(json.dumps(fields))
    assert "no chat template" in evaluation_fails(capsys, broken, TASK, tasks)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    got = evaluation_fails(capsys, broken, TASK, tasks)
    assert got.startswith(
        f"{broken}/config.json: num_hidden_layers is 2, the safetensors files hold 1 layers"
    )


def test_weights_that_are_not_finite_are_named_before_anything_is_sampled(
    hf_dir, tasks, tmp_path, capsys
):
    broken = tmp_path / "broken"
    shutil.copytree(hf_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    got = evaluation_fails(capsys, broken, TASK, tasks, TOKENS, 4)
    assert got.startswith(
        f"{broken}/model.safetensors: tensor model.norm.weight has a value that is"
    )


def test_an_engine_that_cannot_fit_is_refused_before_any_weight_is_read(
    hf_dir, tasks, capsys, monkeypatch
):
    monkeypatch.setattr(
        saved_model, "load_params", lambda *_, **__: pytest.fail("the weights were read")
    )
    monkeypatch.setattr(memory_use, "free_host_bytes", lambda: 1000)
    got = evaluation_fails(capsys, hf_dir, TASK, tasks, TOKENS, 4)
    said = r"memory: this machine has \d+\.\d GiB and the phase 'sample' takes at least \d+\.\d, of which key-"
    assert re.match(said, got)
    assert got.endswith("smaller with rollout.max_rows or rollout.max_completion_tokens")


def test_a_checkpoint_that_is_not_there_is_named(run_dir, tmp_path, capsys):
    got = evaluation_fails(capsys, run_dir, "--step", 9, TOKENS, 4)
    assert got == f"{run_dir}/checkpoints: no checkpoint of step 9"
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint there" in evaluation_fails(capsys, tmp_path, TOKENS, 4)


def test_the_command_itself(hf_dir, tasks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    words = [hf_dir, TASK, tasks, SAMPLES, 1, TEMPERATURE, 0, TOKENS, 4]
    done = subprocess.run(
        [sys.executable, "-m", "bin.evaluate", *map(str, words)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"wrote {tmp_path}/evaluation-coin.json"
    assert json.loads((tmp_path / "evaluation-coin.json").read_text())["average"] == pytest.approx(
        1 / 3
    )


def test_a_run_is_scored_with_its_own_rewards_on_rows_without_answers(run_dir, tmp_path, capsys):
    """The run's rewards are those of its config; its policy always says a box with 7 in it, 4
    tokens with the end.
    """
    path = shutil.copytree(run_dir, tmp_path / "run")
    (tmp_path / "own.py").write_text(
        "def length(completions, completion_ids, bonus, **columns):\n"
        "    assert completions[0][0]['role'] == 'assistant'\n"
        "    return [len(ids) + b for ids, b in zip(completion_ids, bonus)]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"p{n}"}], "bonus": n / 2} for n in range(2)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads((path / "config.json").read_text())
    config["rewards"] |= {"functions": f"{tmp_path}/own.py:length", "weights": [0.5]}
    config["evaluation"]["task"] = str(tmp_path / "held.jsonl")
    (path / "config.json").write_text(json.dumps(config))
    options = (TOKENS, 6, SAMPLES, 2, TEMPERATURE, 0)
    record = _evaluate(tmp_path / "out.json", path, *options)
    # Half of 4 tokens and of 4.5.
    assert record["tasks"]["held"]["problem_averages"] == [2.0, 2.25]
    assert record["settings"]["rewards.functions"] == f"{tmp_path}/own.py:length"
    lines = (tmp_path / "out.problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines if '"row"' in line] == [
        [2, 2],
        [2.25, 2.25],
    ]
    weights = _evaluate(
        tmp_path / "b.json",
        path,
        *options,
        "--config.rewards.functions",
        f"{tmp_path}/own.py:length",
    )
    assert weights["tasks"]["held"]["problem_averages"] == [4.0, 4.5]
    capsys.readouterr()
    assert "no answer in any of the fields" in evaluation_fails(
        capsys, path, *options, "--config.rewards.functions", "math"
    )
    assert "config.rewards.functions: got 'environment'" in evaluation_fails(
        capsys, path, *options, "--config.rewards.functions", "environment"
    )
    assert evaluation_fails(capsys, path, *options, "--config.rewards.functions", "mth").startswith(
        "config.rewards.functions: got 'mth', allowed are math, "
    )


def test_an_environment_is_played_in_turns_and_its_reward_is_the_score(run_dir, tmp_path, capsys):
    """The policy says a box with 7 in it in each turn: 4 tokens with the end. The second turn earns
    the row's bonus.
    """
    (tmp_path / "twice.py").write_text(
        "class Twice:\n"
        "    observation_role = 'user'\n"
        "    def reset(self, prompt, bonus, **columns):\n"
        "        self.bonus, self.turns = bonus, 0\n"
        "    def step(self, text):\n"
        "        assert text.endswith('{7}'), text\n"
        "        self.turns += 1\n"
        "        return ('3', 0.25, False) if self.turns == 1 else ('', self.bonus, True)\n"
    )
    (tmp_path / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "bonus": n}) + "\n" for n in range(2))
    )
    path = shutil.copytree(run_dir, tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    config["task"] |= {
        "environment": f"{tmp_path}/twice.py:Twice",
        "max_turns": 3,
        "max_turn_tokens": 6,
    }
    config["rewards"]["functions"] = "environment"
    (path / "config.json").write_text(json.dumps(config))
    options = (SAMPLES, 2, TEMPERATURE, 0, TASK, tmp_path / "held.jsonl")
    record = _evaluate(tmp_path / "out.json", path, *options, TOKENS, 24)
    assert record["tasks"]["held"]["problem_averages"] == [0.25, 1.25]
    assert record["settings"]["task.environment"] == f"{tmp_path}/twice.py:Twice"
    lines = (tmp_path / "out.problems.jsonl").read_text().splitlines()
    # Two turns of 4 sampled tokens; the answer's tokens are given.
    assert [json.loads(line)["lengths"] for line in lines if '"row"' in line] == [[8, 8], [8, 8]]
    once = _evaluate(
        tmp_path / "once.json", path, *options, TOKENS, 24, "--config.task.max_turns", 1
    )
    assert once["tasks"]["held"]["problem_averages"] == [0.25, 0.25]
    capsys.readouterr()
    options = (*options, TOKENS, 24)
    assert "config.task.environment: " in evaluation_fails(
        capsys, path, *options, "--config.task.environment", "no.py:Name"
    )

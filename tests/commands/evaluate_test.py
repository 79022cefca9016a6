"""`python -m bin.evaluate` with a model whose every answer is known: its output layer is a table of next tokens."""

import json
import os
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
from dcmdp_jax.commands.evaluate_flags import parse, settings_of
from dcmdp_jax.config.settings import from_config_dict, to_dict
from dcmdp_jax.data.arithmetic_tokenizer import build_tokenizer
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run import memory_use as memory_plan
from dcmdp_jax.training.checkpoint import Checkpoints
from dcmdp_jax.training.state import new_state
from tests.support.coin_model import VOCABULARY, coin_model, coin_params, evaluation_fails
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]
_BENCHMARKS = _ROOT.parent / "shared" / "data" / "benchmarks"


@pytest.mark.parametrize(
    ("of_the_run", "flags", "settings"),
    [
        ("strict", [], {}),  # an evaluation that began before the setting goes on
        ("flexible", [], {"answer_extraction": "flexible"}),
        ("strict", ["--answer_extraction=flexible"], {"answer_extraction": "flexible"}),
        ("flexible", ["--answer_extraction=strict"], {}),
    ],
)
def test_answers_are_extracted_as_the_flag_says_or_else_the_run(of_the_run, flags, settings):
    run = to_dict(from_config_dict({"task": {"train": "x.jsonl"}, "rewards": {"answer_extraction": of_the_run}}))
    given = settings_of(parse(["run", "--tasks=x.jsonl", *flags]), run)
    assert {name: value for name, value in given.items() if name == "answer_extraction"} == settings


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """Answers 4 or 7, each with probability 1/2."""
    base = tmp_path_factory.mktemp("hf")
    build_tokenizer().save_pretrained(base / "tokenizer")
    save_params(
        coin_params(coin_model(), "4", "7"),
        coin_model(),
        base / "coin",
        dtype="float32",
        tokenizer_dir=base / "tokenizer",
    )
    return base / "coin"


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
        dual = dual_init(0.1, minimum=0.0, maximum=1.0, tolerance=0.01)
        state = new_state(coin_params(coin_model(64), digit), optax.sgd(0.1), dual)
        checkpoints.save(step, state, model=coin_model(64))
    checkpoints.close()
    return path


def _evaluate(out, *argv):
    main(["evaluate", *map(str, argv), "--out", str(out)])
    return json.loads(out.read_text())


def test_greedy_scores_are_exact(hf_dir, tasks, tmp_path, capsys):
    # The tie between 4 and 7 goes to the lower token id, 4: right on the first problem alone, every time.
    record = _evaluate(
        tmp_path / "out.json", hf_dir, "--tasks", tasks, "--temperature", 0, "--samples", 3,
        "--max_completion_tokens", 6, "--method", "coin, greedy",
    )  # fmt: skip
    scores = record["tasks"]["three"]
    assert scores["problem_averages"] == [1.0, 0.0, 0.0] and scores["problem_rows"] == [0, 1, 2]
    assert scores["pass_at_k"] == pytest.approx(1 / 3) and scores["samples"] == 3
    assert scores["length_mean"] == 4.0 and scores["truncated_fraction"] == 0.0
    output = capsys.readouterr()
    assert [cell.strip() for cell in output.out.splitlines()[2].split("|")] == ["coin, greedy", "33.3", "33.3"]
    assert output.out.splitlines()[-1] == f"wrote {tmp_path / 'out.json'}"
    progress, shares, wrong = output.err.splitlines()
    assert progress.startswith("[1/1] three: avg@3 33.3, 3 problems, 9 completions, ")
    assert shares == "three: 0.0% without an answer, 0.0% cut"
    assert wrong.startswith("  wrong: ") and wrong.endswith("; read as '4'; reference '7'")
    lines = [json.loads(line) for line in (tmp_path / "out.problems.jsonl").read_text().splitlines()]
    four, seven, nine = lines[1:4]
    assert (seven["answer"], seven["found"], seven["scores"]) == ("7", ["4"] * 3, [0, 0, 0])
    assert "4" in four["completions"][0]


def test_sampled_scores_follow_the_models_probabilities_and_the_seed(hf_dir, tasks, tmp_path):
    options = ("--tasks", tasks, "--samples", 64, "--max_completion_tokens", 6)
    record = _evaluate(tmp_path / "out.json", hf_dir, *options)
    four, seven, nine = record["tasks"]["three"]["problem_averages"]
    # Five standard deviations of 64 fair coins are 0.3125.
    assert abs(four - 0.5) < 0.32 and abs(seven - 0.5) < 0.32 and nine == 0.0
    assert record["tasks"]["three"]["pass_at_k"] == pytest.approx(2 / 3)
    assert _evaluate(tmp_path / "again.json", hf_dir, *options) == record
    other = _evaluate(tmp_path / "other.json", hf_dir, *options, "--seed", 1)
    assert other["tasks"]["three"]["problem_averages"] != record["tasks"]["three"]["problem_averages"]


def test_the_length_limit_counts_the_end_token(hf_dir, tasks, tmp_path):
    options = ("--tasks", tasks, "--samples", 1, "--temperature", 0)
    enough = _evaluate(tmp_path / "a.json", hf_dir, *options, "--max_completion_tokens", 4)["tasks"]["three"]
    short = _evaluate(tmp_path / "b.json", hf_dir, *options, "--max_completion_tokens", 3)["tasks"]["three"]
    assert (enough["truncated_fraction"], enough["length_mean"]) == (0.0, 4.0)
    assert (short["truncated_fraction"], short["length_mean"]) == (1.0, 3.0)
    assert short["average"] == enough["average"]  # the box was closed before the limit


def test_problems_can_be_limited_and_long_prompts_left_out(hf_dir, tmp_path, capsys):
    # The template adds 8 tokens, the suffix none: 8 + 2, 8 + 12 and 8 + 2.
    rows = [{"problem": text, "answer": "4"} for text in ("p1", "p2 and longer", "p3", "p4")]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = _evaluate(
        tmp_path / "out.json", hf_dir, "--tasks", path, "--max_problems", 3, "--max_prompt_tokens", 10,
        "--prompt_suffix", "", "--max_completion_tokens", 4, "--samples", 1,
    )  # fmt: skip
    assert record["tasks"]["mixed"]["problem_rows"] == [0, 2] and record["tasks"]["mixed"]["dropped_prompts"] == 1
    assert "left out, prompt over --max_prompt_tokens=10: 1 of mixed" in capsys.readouterr().out


def test_a_run_gives_its_newest_checkpoint_its_task_suffix_and_precision(run_dir, tmp_path):
    record = _evaluate(tmp_path / "out.json", run_dir, "--max_completion_tokens", 4)
    assert (record["model"], record["step"]) == ("demo step 2", 2)
    assert record["tasks"]["held"]["problem_averages"] == [1.0] and record["tasks"]["held"]["samples"] == 8
    settings = record["settings"]
    assert (settings["prompt_suffix"], settings["precision"], settings["compute_dtype"]) == (" Go.", "int8", "float32")
    assert (settings["temperature"], settings["top_p"]) == (0.7, 1.0)


@pytest.mark.parametrize("how", ["--step", "directory"])
def test_an_older_checkpoint_can_be_chosen(run_dir, tmp_path, how):
    where = (run_dir, "--step", 1) if how == "--step" else (run_dir / "checkpoints" / "1",)
    record = _evaluate(tmp_path / "out.json", *where, "--max_completion_tokens", 4)
    assert record["step"] == 1 and record["tasks"]["held"]["average"] == 0.0  # it answers 4, not 7


def test_without_out_a_run_keeps_every_evaluation(run_dir):
    for name in ("evaluation-2.json", "evaluation-2-2.json"):
        main(["evaluate", str(run_dir), "--max_completion_tokens", "4", "--samples", "1"])
        assert json.loads((run_dir / name).read_text())["average"] == 1.0
    assert not list(run_dir.glob(".evaluation*"))


@pytest.mark.skipif(not _BENCHMARKS.is_dir(), reason="the benchmark files are not beside this checkout")
def test_the_six_benchmarks_with_the_papers_k(tmp_path, capsys, monkeypatch):
    # Six shapes compile several times faster for one device.
    monkeypatch.setattr(evaluate, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = coin_model(4096)
    save_params(coin_params(model, "4"), model, tmp_path / "m", dtype="bfloat16", tokenizer_dir=tmp_path / "tokenizer")
    names = ["olympiadbench", "minerva", "math500", "amc23", "aime25", "aime24"]
    files = ",".join(str(_BENCHMARKS / f"{name}.jsonl") for name in names)
    # Few rows at a time: one shape for K = 32 and K = 4.
    record = _evaluate(
        tmp_path / "out.json", tmp_path / "m", "--tasks", files, "--max_problems", 1, "--max_completion_tokens", 4,
        "--max_rows", 4,
    )  # fmt: skip
    assert {name: record["tasks"][name]["samples"] for name in names} == {
        "aime24": 32, "aime25": 32, "amc23": 32, "math500": 4, "minerva": 4, "olympiadbench": 4,
    }  # fmt: skip
    heading = capsys.readouterr().out.splitlines()[0]
    assert [cell.strip() for cell in heading.split("|")] == [
        "Method", "AIME24", "AIME25", "AMC23", "MATH-500", "Minerva", "Olympiad", "Avg",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(not _BENCHMARKS.is_dir(), reason="the benchmark files are not beside this checkout")
def test_every_row_of_the_six_benchmarks_is_answered_and_graded(tmp_path, monkeypatch, record_property):
    """A tiny policy that always says 4, once for each problem: right where the file's answer is 4, or 4 degrees."""
    monkeypatch.setattr(evaluate, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = coin_model(8192)
    save_params(coin_params(model, "4"), model, tmp_path / "m", dtype="float32", tokenizer_dir=tmp_path / "tokenizer")
    names = ["aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench"]
    files = {name: _BENCHMARKS / f"{name}.jsonl" for name in names}
    words = (tmp_path / "m", "--tasks", ",".join(map(str, files.values())), "--samples", 1,
             "--max_completion_tokens", 4, "--max_rows", 16)  # fmt: skip
    record = _evaluate(tmp_path / "out.json", *words)
    # As a kill leaves it, in the middle of a part; what is continued ends with the same bytes.
    whole = (tmp_path / "out.problems.jsonl").read_bytes()
    (tmp_path / "cut.problems.jsonl").write_bytes(whole[: 3 * len(whole) // 4])
    assert _evaluate(tmp_path / "cut.json", *words) == record
    assert (tmp_path / "cut.problems.jsonl").read_bytes() == whole
    for name, path in files.items():
        answers = [_raw_answer(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        scores = record["tasks"][name]
        assert (scores["problems"], scores["samples"], scores["dropped_prompts"]) == (len(answers), 1, 0)
        assert scores["problem_averages"] == [float(answer in ("4", r"4^{\circ}")) for answer in answers]
        assert (scores["verifier_timeouts"], scores["verifier_errors"]) == (0, 0)
        record_property(name, f"{len(answers)} rows, {answers.count('4')} right")


def _raw_answer(row):
    """A published row's answer as text, without a dollar sign, a unit or a decimal point that is nothing."""
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
        tmp_path / "out.json", hf_dir, "--tasks", f"{arithmetic},{tasks}", "--max_completion_tokens", 4, "--samples", 1
    )
    assert {name: task["problems"] for name, task in record["tasks"].items()} == {arithmetic: 3, "three": 3}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--sampels", "4"), "--sampels: no such argument; did you mean --samples?"),
        (("--samples", "many"), "argument --samples: got 'many', must be a whole number"),
        (("--samples", "0"), "argument --samples: got 0, must be at least 1"),
        (("--seed", "-1"), "argument --seed: got -1, must be in [0, 4294967295]"),
        (("--samples", "1_000"), "argument --samples: got '1_000', must be a whole number"),
        (("--samples", "４"), "argument --samples: got '４', must be a whole number"),
        (("--samples", "٤"), "argument --samples: got '٤', must be a whole number"),
        (("--samples", "9" * 5000), f"argument --samples: got '{'9' * 80}'... (5,000 characters), must be a whole"),
        (("--samples", "9999999999"), "argument --samples: got 9999999999, must be in [1, 2147483647]"),
        (
            ("--samples", "1000000000"),
            "--samples: got 1000000000; three has 3 problems x 1,000,000,000 samples = 3,000,000,000 completions, the "
            "most are 10,000,000; lower --samples or --max_problems",
        ),
        (("--max_rows", "1000000000"), "argument --max_rows: got 1000000000, must be in [1, 65536]"),
        (("--step", "-1"), "argument --step: got -1, must be at least 0"),
        (("--temperature", "warm"), "argument --temperature: got 'warm', must be a number"),
        (("--temperature", "０.７"), "argument --temperature: got '０.７', must be a number"),
        (("--temperature", "inf"), "argument --temperature: got inf, must be 0 (greedy) or in [0.01, 100]"),
        (("--temperature", "nan"), "argument --temperature: got nan, must be"),
        (("--temperature", "1e-30"), "argument --temperature: got 1e-30, must be 0 (greedy) or in [0.01, 100]"),
        (("--temperature", "1e30"), "argument --temperature: got 1e+30, must be 0 (greedy) or in [0.01, 100]"),
        (("--temperature", "-1"), "argument --temperature: got -1, must be 0 (greedy) or in [0.01, 100]"),
        (("--top_p", "0"), "argument --top_p: got 0, must be in (0, 1]"),
        (("--top_p", "nan"), "argument --top_p: got nan, must be in (0, 1]"),
        (("--top_p", "inf"), "argument --top_p: got inf, must be in (0, 1]"),
        (("--precision", "fp9"), "--precision: got 'fp9', allowed with --engine local are exact, float32, bfloat16,"),
        (
            ("--engine", "vllm", "--precision", "exact"),
            "--precision: got 'exact', allowed with --engine vllm are float32,",
        ),
        (("--engine", "http"), "--server: goes with --engine http, which needs it"),
        # As it was called.
        (("--engine", "remote"), "--server: goes with --engine http, which needs it"),
        (("--server", "/tmp/s"), "--server: goes with --engine http"),
        (("--engine", "htp"), "--engine: got 'htp', allowed are local, vllm, http, module:NAME and path.py:NAME; did "),
        (("--engine_args", "[]"), "--engine_args: goes with an engine by path, and this one is local"),
        (("--engine", "remote", "--server", "{tmp}/none"), "--server: {tmp}/none is no Unix socket"),
        (("--step", "3"), "--step: got 3, but {hf} is no run directory; only a run's checkpoints have steps"),
        (("--tasks", "{tmp}/none.jsonl"), "data {tmp}/none.jsonl: no such file"),
        (("--tasks", "a/x.jsonl,b/x.jsonl"), "argument --tasks: a/x.jsonl and b/x.jsonl are both called 'x'; rename"),
        (("--tasks", "a.jsonl,,b.jsonl"), "argument --tasks: got 'a.jsonl,,b.jsonl', an empty name is no task"),
        (("--out", "{tmp}"), "--out: {tmp} is a directory, name a file"),
        (("--out", "{tmp}/no/o.json"), "--out: {tmp}/no/o.json can't be written, {tmp}/no is no directory"),
    ],
)
def test_bad_arguments_are_one_line_before_any_weight_is_read(hf_dir, tasks, tmp_path, capsys, monkeypatch, argv, line):
    monkeypatch.setattr(evaluate, "load_params", lambda *_, **__: pytest.fail("the weights were read"))
    places = {"tmp": tmp_path, "hf": hf_dir}
    given = [word.format(**places) for word in argv]
    got = evaluation_fails(capsys, hf_dir, "--tasks", tasks, "--max_completion_tokens", 4, *given)
    assert got.startswith(line.format(**places))


def test_a_length_that_does_not_fit_names_the_one_that_does(hf_dir, tasks, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "load_params", lambda *_, **__: pytest.fail("the weights were read"))
    # 8 tokens of template, 2 of the problem: 256 - 10.
    assert evaluation_fails(capsys, hf_dir, "--tasks", tasks, "--prompt_suffix", "") == (
        "--max_completion_tokens: got 32768, with the longest prompt (10 tokens, three) more than the model's "
        "max_position_embeddings=256; --max_completion_tokens=246 fits"
    )
    long = "x" * 300
    assert "--max_prompt_tokens leaves it out" in evaluation_fails(
        capsys, hf_dir, "--tasks", tasks, "--prompt_suffix", long
    )


def test_bad_files_are_named(hf_dir, tasks, tmp_path, capsys):
    with tasks.open("a") as file:
        file.write('{"problem": "p", "answer": ""}\n')
    assert evaluation_fails(capsys, hf_dir, "--tasks", tasks).startswith(f"{tasks}:4: ")
    assert (
        evaluation_fails(capsys, tmp_path / "nothing", "--tasks", tasks)
        == f"MODEL {tmp_path}/nothing: no such directory"
    )
    assert "no config.json" in evaluation_fails(capsys, tmp_path, "--tasks", tasks)
    assert evaluation_fails(capsys, hf_dir).startswith("--tasks is missing")


def test_a_directory_without_a_tensor_or_a_chat_template_is_refused(hf_dir, tasks, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in hf_dir.iterdir():
        if path.name != "chat_template.jinja":
            (broken / path.name).write_bytes(path.read_bytes())
    fields = json.loads((broken / "tokenizer_config.json").read_text())
    fields.pop("chat_template", None)
    (broken / "tokenizer_config.json").write_text(json.dumps(fields))
    assert "no chat template" in evaluation_fails(capsys, broken, "--tasks", tasks)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    got = evaluation_fails(capsys, broken, "--tasks", tasks)
    assert got.startswith(f"{broken}/config.json: num_hidden_layers is 2, the safetensors files hold 1 layers")


def test_weights_that_are_not_finite_are_named_before_anything_is_sampled(hf_dir, tasks, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(hf_dir, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    got = evaluation_fails(capsys, broken, "--tasks", tasks, "--max_completion_tokens", 4)
    assert got.startswith(f"{broken}/model.safetensors: tensor model.norm.weight has 1 value(s) of {VOCABULARY} that")


def test_an_engine_that_cannot_fit_is_refused_before_any_weight_is_read(hf_dir, tasks, capsys, monkeypatch):
    monkeypatch.setattr(evaluate, "load_params", lambda *_, **__: pytest.fail("the weights were read"))
    monkeypatch.setattr(memory_plan, "free_host_bytes", lambda: 1000)
    got = evaluation_fails(capsys, hf_dir, "--tasks", tasks, "--max_completion_tokens", 4)
    assert got.startswith("memory: this machine has 0.0 GiB and the phase 'sample' takes at least 0.0, of which key-")
    assert got.endswith("smaller with --max_rows or --max_completion_tokens")


def test_a_checkpoint_that_is_not_there_is_named(run_dir, tmp_path, capsys):
    got = evaluation_fails(capsys, run_dir, "--step", 9, "--max_completion_tokens", 4)
    assert got == f"{run_dir}/checkpoints: no checkpoint of step 9"
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint there" in evaluation_fails(capsys, tmp_path, "--max_completion_tokens", 4)


def test_the_command_itself(hf_dir, tasks, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    words = [hf_dir, "--tasks", tasks, "--samples", 1, "--temperature", 0, "--max_completion_tokens", 4]
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
    assert json.loads((tmp_path / "evaluation-coin.json").read_text())["average"] == pytest.approx(1 / 3)


def test_a_run_is_scored_with_its_own_rewards_on_rows_without_answers(run_dir, tmp_path, capsys):
    """The run's rewards are those of its config; its policy always says a box with 7 in it, 4 tokens with the end."""
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
    options = ("--max_completion_tokens", 6, "--samples", 2, "--temperature", 0)
    record = _evaluate(tmp_path / "out.json", path, *options)
    # Half of 4 tokens and of 4.5.
    assert record["tasks"]["held"]["problem_averages"] == [2.0, 2.25]
    assert record["settings"]["rewards"] == f"{tmp_path}/own.py:length"
    lines = (tmp_path / "out.problems.jsonl").read_text().splitlines()
    assert [json.loads(line)["scores"] for line in lines if '"row"' in line] == [[2, 2], [2.25, 2.25]]
    weights = _evaluate(tmp_path / "b.json", path, *options, "--rewards", f"{tmp_path}/own.py:length")
    assert weights["tasks"]["held"]["problem_averages"] == [4.0, 4.5]
    capsys.readouterr()
    assert "no answer in any of the fields" in evaluation_fails(capsys, path, *options, "--rewards", "math")
    assert "--rewards: got 'environment'" in evaluation_fails(capsys, path, *options, "--rewards", "environment")
    assert evaluation_fails(capsys, path, *options, "--rewards", "mth").startswith(
        "--rewards: got 'mth', allowed are math, "
    )


def test_an_environment_is_played_in_turns_and_its_reward_is_the_score(run_dir, tmp_path, capsys):
    """The policy says a box with 7 in it in each turn: 4 tokens with the end. The second turn earns the row's bonus."""
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
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"prompt": f"{n}", "bonus": n}) + "\n" for n in range(2)))
    path = shutil.copytree(run_dir, tmp_path / "run")
    config = json.loads((path / "config.json").read_text())
    config["task"] |= {"environment": f"{tmp_path}/twice.py:Twice", "max_turns": 3, "max_turn_tokens": 6}
    config["rewards"]["functions"] = "environment"
    (path / "config.json").write_text(json.dumps(config))
    options = ("--samples", 2, "--temperature", 0, "--tasks", tmp_path / "held.jsonl")
    record = _evaluate(tmp_path / "out.json", path, *options, "--max_completion_tokens", 24)
    assert record["tasks"]["held"]["problem_averages"] == [0.25, 1.25]
    assert record["settings"]["environment"] == {
        "name": f"{tmp_path}/twice.py:Twice", "max_turns": 3, "max_turn_tokens": 6,
    }  # fmt: skip
    lines = (tmp_path / "out.problems.jsonl").read_text().splitlines()
    # Two turns of 4 sampled tokens; the answer's tokens are given.
    assert [json.loads(line)["lengths"] for line in lines if '"row"' in line] == [[8, 8], [8, 8]]
    once = _evaluate(tmp_path / "once.json", path, *options, "--max_completion_tokens", 24, "--max_turns", 1)
    assert once["tasks"]["held"]["problem_averages"] == [0.25, 0.25]
    capsys.readouterr()
    options = (*options, "--max_completion_tokens", 24)
    assert "--environment: " in evaluation_fails(capsys, path, *options, "--environment", "no.py:Name")
    assert "--max_turns: got 2, goes with" in evaluation_fails(
        capsys, run_dir, *options, "--rewards", "math", "--max_turns", 2
    )  # fmt: skip

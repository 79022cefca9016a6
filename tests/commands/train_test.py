"""`python -m bin.train`: bad input is one line and a code within seconds, --dry-run plans and
leaves nothing.

Importing JAX, Orbax and transformers takes seconds, so one process imports them and forks for each
command; what the child does from there is what `python -m bin.train` does.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_weights import save_params
from dcmdp_jax.models.params import init_params
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(_ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
# So that a forked command does not start again.
_ENVIRONMENT |= {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}

# Reads {name: arguments}, writes {name: [exit code, stdout, stderr]}.
_FORKS = """
import json, os, runpy, sys
sys.modules["wandb"] = sys.modules["torch"] = None  # not installed, whatever this environment holds
import dcmdp_jax.commands.failures, dcmdp_jax.commands.flags, dcmdp_jax.observe.report, dcmdp_jax.training.loop
import dcmdp_jax.run.run

outcomes = {}
for name, arguments in json.load(sys.stdin).items():
    files = [f"{sys.argv[1]}/{name}.{stream}" for stream in ("out", "err")]
    if not (child := os.fork()):
        for path, number in zip(files, (1, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["train.py", *arguments]
        runpy.run_module("bin.train", run_name="__main__")
        os._exit(99)  # run_module ends in sys.exit
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcomes[name] = [code, *(open(path).read() for path in files)]
json.dump(outcomes, sys.stdout)
"""


def _model_directories(base):
    """A microscopic Qwen3, and copies of it with one thing broken each."""
    model = ModelConfig(
        "qwen3",
        len(build_tokenizer()),
        16,
        32,
        1,
        2,
        1,
        8,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    build_tokenizer().save_pretrained(base / "tokenizer")
    params = init_params(model, jax.random.key(0))
    directories = {}
    for name in ("whole", "missing", "mute", "endless", "wordless", "deaf", "beyond"):
        directories[name] = base / name
        save_params(params, model, base / name, dtype="float32", tokenizer_dir=base / "tokenizer")
    # One layer more than there are tensors for.
    path = directories["missing"] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    (directories["mute"] / "chat_template.jinja").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directories["wordless"] / name).unlink()
    (directories["deaf"] / "chat_template.jinja").write_text("<|im_start|>user\nGo on.<|im_end|>\n")
    (directories["beyond"] / "generation_config.json").write_text(
        json.dumps({"eos_token_id": model.vocab_size})
    )
    path = directories["endless"] / "tokenizer_config.json"
    fields = {
        key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token"
    }
    path.write_text(json.dumps(fields))
    return directories


def _commands(base):
    """name -> (arguments, text that the one line holds)."""
    models = _model_directories(base)
    (base / "file").write_text("")
    rows = [
        '{"prompt": "1+1=?", "label": "2"}',
        '{"prompt": "1+2=?"}',
        '{"prompt": "1+3=?", "label": "4"}',
    ]
    (base / "rows.jsonl").write_text("\n".join(rows))
    (base / "empty.jsonl").write_text("")
    run_dir = f"--config.run_dir={base}/run"
    (base / "waits").mkdir()
    os.mkfifo(base / "waits" / ".lock")
    debug = ["--config=configs/demo.py:debug", run_dir]

    def model(name):
        return [*debug, f"--config.model.path={models[name]}"]

    return {
        "misspelled_flag": (
            [*debug, "--config.algorithm.tolerence=0.1"],
            "config.algorithm.tolerence: no such setting; did you mean 'algorithm.tolerance'?",
        ),
        "misspelled_own_flag": (
            [*debug, "--dry_rum"],
            "--dry_rum: no such argument; did you mean --dry-run?",
        ),
        "ill_typed_flag": (
            [*debug, "--config.training.steps=many"],
            "config.training.steps: got 'many', must be a whole number in digits 0-9",
        ),
        "misspelled_file": (
            ["--config=configs/dem.py"],
            "--config: no file configs/dem.py; did you mean configs/demo.py?",
        ),
        "misspelled_choice": (
            [*debug, "--config.algorithm.method=dcgrpo"],
            "config.algorithm.method: got 'dcgrpo'; did you mean dc_grpo or grpo or dual_grpo? "
            "allowed are grpo, dual_grpo, threshold_grpo, dc_grpo, state_tv, state_kl, "
            "state_delta, and functions of yours as path.py:function",
        ),
        "group_of_one": (
            [*debug, "--config.rollout.group_size=1"],
            "config.rollout.group_size: got 1, must be at least 2",
        ),
        "nucleus": (
            [*debug, "--config.rollout.top_p=0.9"],
            "config.rollout.top_p: got 0.9, the trainer needs all tokens that it keeps; set "
            "rollout.top_logprobs",
        ),
        "mini_batch": (
            [*debug, "--config.training.prompts_per_mini_batch=3"],
            "config.training.prompts_per_mini_batch: got 3, must divide "
            "training.prompts_per_step=4",
        ),
        "unwritable": (
            ["--config=configs/demo.py:debug", f"--config.run_dir={base}/file/run"],
            f"config.run_dir: {base}/file/run can't be written ({base}/file); choose another "
            "directory",
        ),
        "fifo": (
            ["--config=configs/demo.py:debug", f"--config.run_dir={base}/waits"],
            f"config.run_dir: {base}/waits/.lock is no file (a FIFO, socket or device); move it "
            "away, or",
        ),
        "long_run_dir": (
            ["--config=configs/demo.py:debug", f"--config.run_dir=/{'d' * 5000}"],
            f"config.run_dir: '/{'d' * 79}'... (5,001 characters) is too long; choose one of at "
            "most 3,500",
        ),
        "mesh": (
            [*debug, "--config.mesh.tensor=3", "--config.mesh.cpu_devices=2"],
            "config.mesh (data=1, fsdp=-1, tensor=3, expert=1): 3 does not divide the 2 devices; "
            "that do 1, 2",
        ),
        "missing_tensor": (
            model("missing"),
            f"{models['missing']}/config.json: num_hidden_layers is 2, the safetensors files hold "
            "1 layers",
        ),
        "no_model": (
            [*debug, f"--config.model.path={base}/nowhere"],
            f"config.model.path: no directory {base}/nowhere; `hf download OWNER/MODEL "
            f"--local-dir {base}/nowhere`",
        ),
        "no_tokenizer": (
            model("wordless"),
            f"config.model.path: tokenizer {models['wordless']}: no tokenizer.json or vocab.json "
            "there; copy the model's tokenizer files in; model.tokenizer may name another",
        ),
        "no_tokenizer_directory": (
            [*debug, "--config.model.tokenizer=/nowhere"],
            "config.model.tokenizer: tokenizer /nowhere: no such directory",
        ),
        "deaf_chat_template": (
            model("deaf"),
            f"config.model.path: tokenizer {models['deaf']}: its chat template leaves out the "
            "text of",
        ),
        "end_token_beyond": (
            model("beyond"),
            f"{models['beyond']}/generation_config.json: eos_token_id is 104, the model's tokens "
            "are 0 to 103",
        ),
        "no_chat_template": (
            model("mute"),
            f"config.model.path: tokenizer {models['mute']}: no chat template",
        ),
        "no_end_token": (
            model("endless"),
            f"config.model.path: tokenizer {models['endless']}: no end-of-sequence token",
        ),
        "too_long_for_the_model": (
            [
                *model("whole"),
                "--config.rollout.max_completion_tokens=200",
                "--config.training.row_lengths=()",
            ],
            "config.rollout.max_completion_tokens: 200 and task.max_prompt_tokens=64 make 264, "
            "the model has max_position_embeddings=256",
        ),
        "malformed_row": (
            [*debug, f"--config.task.train={base}/rows.jsonl"],
            f"config.task.train: {base}/rows.jsonl:2: no answer in any of the fields",
        ),
        "empty_data": (
            [*debug, f"--config.task.train={base}/empty.jsonl"],
            f"config.task.train: {base}/empty.jsonl: the file is empty",
        ),
        "warm_up_data": (
            [*debug, f"--config.warmup.task={base}/none.jsonl"],
            f"config.warmup.task: data {base}/none.jsonl: no such file",
        ),
        "not_installed": (
            [*debug, "--config.observe.wandb_project=x"],
            "wandb_project is 'x' but Weights & Biases is not installed",
        ),
        "no_data": (
            [*debug, f"--config.task.train={base}/none.parquet"],
            f"config.task.train: data {base}/none.parquet: no such file",
        ),
    }


_NAMES = """
    misspelled_flag misspelled_own_flag ill_typed_flag misspelled_file misspelled_choice group_of_one nucleus
    mini_batch unwritable fifo long_run_dir mesh missing_tensor no_model no_tokenizer no_tokenizer_directory
    deaf_chat_template end_token_beyond no_chat_template no_end_token too_long_for_the_model malformed_row
    empty_data warm_up_data not_installed no_data
""".split()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Where the commands ran, what each should say, and (code, stdout, stderr) of each."""
    base = tmp_path_factory.mktemp("train")
    commands = _commands(base)
    given = {name: arguments for name, (arguments, _) in commands.items()}
    whole = [
        "--config=configs/demo.py:debug",
        f"--config.run_dir={base}/planned",
        "--config.mesh.cpu_devices=1",
        "--config.algorithm.tolerance_steps=4",
        "--config.algorithm.multiplier_max=0.1",
        "--dry-run",
    ]
    given["dry_run"] = whole
    given["dry_run_of_a_model"] = [*whole, f"--config.model.path={base}/whole"]
    done = subprocess.run(
        [sys.executable, "-c", _FORKS, str(base)],
        input=json.dumps(given),
        cwd=_ROOT,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    return base, {name: line for name, (_, line) in commands.items()}, json.loads(done.stdout)


def test_every_command_has_its_test(outcomes):
    assert sorted(_NAMES) == sorted(outcomes[1])


@pytest.mark.parametrize("name", _NAMES)
def test_bad_input_is_one_line_and_code_2(outcomes, name):
    base, lines, results = outcomes
    code, out, err = results[name]
    assert err.startswith(f"error: {lines[name]}"), err
    assert err.count("\n") == 1 and "Traceback" not in err
    assert code == 2 and out == ""
    assert not (base / "run").exists()


def test_a_dry_run_prints_the_plan_and_leaves_no_directory(outcomes):
    base, _, results = outcomes
    code, out, err = results["dry_run"]
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    # Four prompts of four completions in two mini-batches of eight.
    assert lines["step"] == "4 prompts x 4 = 16 completions of at most 16 tokens, 2 update(s)"
    rows = (
        r"micro-batches of (\d+ x \d+, )*\d+ x \d+ tokens, each shape compiled; \d+% padding "
        r"expected of completions "
    )
    assert re.fullmatch(rows + "with a median of 4 tokens", lines["rows"])
    assert (
        "c = 0.0012 for 4 steps, then 1.25 times their median discrepancy (noise floor, if larger), "
        "lambda_0" in lines["method"]
    )
    assert lines["method"].endswith("lambda_0 = 0.1, eta = 50, lambda begins at its cap of 0.1")
    assert lines["problems"] == "64 to train on (0 dropped: prompt too long), 8 of arithmetic x 2"
    assert lines["run"] == f"{base}/planned, 2 steps" and lines["devices"].startswith("1 x cpu")
    assert not (base / "planned").exists()


def test_a_dry_run_of_a_model_counts_its_parameters(outcomes):
    code, out, err = outcomes[2]["dry_run_of_a_model"]
    assert (code, err) == (0, "")
    # Embedding 104 x 16; q, o 16 x 16 each, k, v 16 x 8 each, MLP 3 x 16 x 32; norms 16, 16, 8, 8
    # and the last 16.
    assert f"{104 * 16 + 2 * 256 + 2 * 128 + 1536 + 48 + 16:,} parameters in float32" in out


def test_the_command_itself_as_a_process_of_its_own(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bin.train",
            "--config=configs/demo.py",
            "--config.rollout.group_size=1",
        ],
        cwd=_ROOT,
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        "error: config.rollout.group_size: got 1, must be at least 2 "
        "(one completion has no group to be compared with)\n"
    )

"""The command: what it prints, what it writes, what bad input gets."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from dcmdp_jax.algorithm.dual import dual_init
from dcmdp_jax.commands.convert import main
from dcmdp_jax.config import load
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.tokenizer import save_tokenizer
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_weights import iterate_hf_tensors, load_params, save_params
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.run import checkpoint
from dcmdp_jax.run.weights import find_params
from dcmdp_jax.training.state import new_state
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig("qwen3", 104, 8, 12, 2, 4, 2, 4)  # the built-in tokenizer's 104 tokens


@pytest.fixture
def source(tmp_path):
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(build_tokenizer(), tokenizer, (2, 3))
    params = init_params(CONFIG, jax.random.key(0))
    save_params(params, CONFIG, tmp_path / "source", dtype="float32", tokenizer_dir=tokenizer)
    return tmp_path / "source"


def _run(*arguments):
    command = [sys.executable, "-m", "bin.convert", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )


def test_hf_check(source, capsys):
    main(["convert", "hf-check", str(source)])
    out = capsys.readouterr().out
    # 2 * (q, o 2*8*16 + k, v 2*8*8 + norms 2*8 + 2*4 + MLP 3*8*12) + 2*104*8 + 8 = 2 * 696 + 1672
    assert num_params(CONFIG) == 3064
    assert (
        "qwen3, 3,064 parameters, 2 layers, hidden 8, MLP 12, heads 4/2 of 4, vocabulary 104, "
        "untied" in out
    )
    assert "tensors      25 F32; " in out  # 2 * 11 + embedding, norm and output
    assert "in 1 file(s)" in out
    assert "tokenizer    104 tokens; a completion ends with 2, 3\n" in out
    assert out.endswith(f"{source}: fits its config.json, all values are finite\n")


def test_hf_check_counts_the_ids_beyond_the_tokenizer(tmp_path, capsys):
    config = dataclasses.replace(CONFIG, vocab_size=107)
    save_tokenizer(build_tokenizer(), tmp_path / "tokenizer", (2,))
    params = init_params(config, jax.random.key(0))
    save_params(
        params, config, tmp_path / "model", dtype="float32", tokenizer_dir=tmp_path / "tokenizer"
    )
    main(["convert", "hf-check", str(tmp_path / "model")])
    assert (
        "3 of the model's ids, from 104 on, are no tokens and have no text\n"
        in capsys.readouterr().out
    )


def test_a_directory_without_a_tokenizer_is_named(source, capsys):
    (source / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="source: no tokenizer.json or vocab.json there"):
        main(["convert", "hf-check", str(source)])
    assert capsys.readouterr().out == ""


def test_failures_are_one_line_and_a_code(source, tmp_path):
    file = source / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    failed = _run("hf-check", source)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith(f"error: {file}: truncated or not a safetensors file (")
    assert failed.stderr.count("\n") == 1

    file.write_bytes(whole)
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    failed = _run("hf-check", source)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr == f"error: {file}: tensor model.norm.weight is missing, expected [8]\n"


def test_hf_check_reads_the_values(source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = np.full(8, np.inf, np.float32)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=r"model.norm.weight has a value that is not finite: inf at \[0\]; the weights",
    ):
        main(["convert", "hf-check", str(source)])


def _damaged(tensors, fields, damage):
    """Change the tensors or config.json of a directory whose head is another matrix than its
    embedding.
    """
    if damage == "tied":
        fields["tie_word_embeddings"] = True
    elif damage == "head without an embedding":
        del tensors["model.embed_tokens.weight"]
    elif damage == "half a head":
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:52]
    elif damage == "integers":
        tensors["model.norm.weight"] = np.ones(8, np.int32)
    elif damage == "not a number in the last row":
        tensors["lm_head.weight"][-1, -1] = np.nan
    else:
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "tied",
            "tensor lm_head.weight differs from model.embed_tokens.weight, but config.json ties "
            "them",
        ),
        ("head without an embedding", "tensor model.embed_tokens.weight is missing"),
        ("half a head", "tensor lm_head.weight is [52, 8], expected [104, 8]"),
        ("integers", "tensor model.norm.weight is I32, readable are"),
        (
            "not a number in the last row",
            "tensor lm_head.weight has a value that is not finite: nan at [103, 7]",
        ),
        ("a bias", "tensor model.layers.0.self_attn.q_proj.bias is unknown to qwen3"),
    ],
)
def test_hf_check_refuses_what_loading_refuses_in_the_same_words(source, damage, message):
    tensors = load_file(source / "model.safetensors")
    fields = json.loads((source / "config.json").read_text())
    _damaged(tensors, fields, damage)
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=re.escape(message)) as loading:
        load_params(source, read_model_config(source), dtype="float32")
    with pytest.raises(ValueError, match="^" + re.escape(str(loading.value)) + "$"):
        main(["convert", "hf-check", str(source)])


@pytest.mark.parametrize("inner", ["", "checkpoints", "checkpoints/3"])
def test_a_run_is_to_be_exported_first(tmp_path, inner):
    run = tmp_path / "run"
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(load.to_saved(Config())))
    path = run / inner
    message = f"{path}: belongs to a run; export it first: dcmdp convert export {path} OUT_DIR"
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        main(["convert", "hf-check", str(path)])
    (run / "config.json").unlink()  # killed before its first step
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        main(["convert", "hf-check", str(path)])


def test_the_help_names_the_families_that_gguf_files_are_read_of(capsys):
    """As llama.cpp names them, in the file's general.architecture; tests/models/gguf_test.py reads
    one of each.
    """
    with pytest.raises(SystemExit):
        main(["convert", "from-gguf", "--help"])
    assert "a whole .gguf of llama, qwen2, qwen3, qwen3moe, gemma3 OUT_DIR" in " ".join(
        capsys.readouterr().out.split()
    )


def test_hf_check_reads_the_tokenizer(source):
    (source / "generation_config.json").write_text('{"eos_token_id": 104}')
    with pytest.raises(ValueError, match="eos_token_id is 104, the model's tokens are 0 to 103"):
        main(["convert", "hf-check", str(source)])
    (source / "chat_template.jinja").write_text("Go on.")
    with pytest.raises(ValueError, match="its chat template leaves out the text of the user"):
        main(["convert", "hf-check", str(source)])


def test_export_of_nothing(tmp_path):
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint there"):
        main(["convert", "export", str(tmp_path), str(tmp_path / "out")])


def test_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(ValueError, match="argument --dtype: invalid choice: 'float16'"):
        main(["convert", "export", str(tmp_path), str(tmp_path / "out"), "--dtype", "float16"])


def test_an_adapter_that_would_not_be_pushed_is_refused(tmp_path):
    words = ["export", str(tmp_path), str(tmp_path / "out"), "--adapter", "--push=me/mine"]
    with pytest.raises(ValueError, match="^--push: got with --adapter, and only whole models are"):
        main(["convert", *words])


def test_export_of_a_checkpoint(tmp_path, capsys):
    """The step asked for, its parameters to the last bit, and the run's tokenizer beside them."""
    run_dir = tmp_path / "run"
    states = {}
    checkpoints = checkpoint.Checkpoints(run_dir, keep_last=2, keep_best=0)
    for step in (1, 2):
        params = init_params(CONFIG, jax.random.key(step))
        states[step] = dict(iterate_hf_tensors(params, CONFIG, "float32"))
        dual = dual_init(0.0, tolerance=0.01)
        checkpoints.save(step, new_state(params, optax.adamw(1e-3), dual), model=CONFIG)
    checkpoints.close()
    tokenizer = find_params(run_dir).tokenizer
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text('{"of": "the run"}')
    for arguments, step in (([], 2), (["--step", "1"], 1)):
        out_dir = tmp_path / f"out{step}"
        main(["convert", "export", str(run_dir), str(out_dir), "--dtype", "float32", *arguments])
        assert f"checkpoint of step {step}\n" in capsys.readouterr().out
        written = load_file(out_dir / "model.safetensors")
        assert written.keys() == states[step].keys()
        for name, value in states[step].items():
            np.testing.assert_array_equal(written[name], value)
        assert read_model_config(out_dir) == CONFIG
        assert (out_dir / "tokenizer.json").read_text() == '{"of": "the run"}'
    for out_dir in (run_dir.parent, run_dir, run_dir / "checkpoints" / "1"):
        with pytest.raises(ValueError, match="which it is made of; choose another directory"):
            main(["convert", "export", str(run_dir), str(out_dir), "--overwrite"])
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of step 7"):
        main(["convert", "export", str(run_dir), str(tmp_path / "none"), "--step", "7"])

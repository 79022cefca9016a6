"""Whole runs that train adapters: resumed, exported, gone on with, refused on another base.

Exports are merged and for PEFT.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from dcmdp_jax.models.lora import SavedAdapters
from dcmdp_jax.run.checkpoint import CheckpointError
from dcmdp_jax.run.weights import find_params
from tests.support.runs import ROOT, finish, read_digests, read_metadata, read_records, start
from tests.support.waiting import HANGS_S

LORA = (
    "--config.model.lora_rank=4",
    "--config.model.lora_alpha=6",
    "--config.model.lora_base=float32",
    "--config.rollout.lag=1",
)
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _tensors(directory, name="model.safetensors"):
    with safe_open(directory / name, framework="flax") as file:
        return {key: np.asarray(file.get_tensor(key), np.float32) for key in file.keys()}  # noqa: SIM118


def _convert(environment, *arguments, code=0):
    command = [sys.executable, "-m", "bin.convert", "export", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_dir(run_environment, tmp_path_factory):
    """Three steps in one go."""
    directory = tmp_path_factory.mktemp("lora") / "run"
    finish(start(run_environment, directory, [*LORA, "--config.training.steps=3"]))
    return directory


def test_a_checkpoint_has_the_adapters_alone_and_what_they_were_trained_on(run_dir):
    metadata = read_metadata(run_dir, 3)
    assert metadata["adapters"] == {
        "rank": 4,
        "alpha": 6.0,
        "targets": ["all-linear"],
        "base_dtype": "float32",
        "base_path": str(run_dir / "reference"),
    }
    paths = metadata["digests"]["params"]
    assert len(paths) == 2 * len(MODULES)
    assert all(path.endswith(("['a']", "['b']")) for path in paths)
    assert len(metadata["digests"]["reference"]) > len(paths) / 2
    # The first weight sync is of the base itself; fp8 keeps three bits of a sum, and little of a
    # change of a thousandth.
    rounding = [
        record["mismatch/merge_rounding"]
        for _, record in sorted(read_records(run_dir).items())
        if "mismatch/merge_rounding" in record
    ]
    assert rounding[0] == 0 and all(0.3 < value < 30 for value in rounding[1:]), rounding
    assert read_metadata(run_dir, 0)["digests"]["reference"] == metadata["digests"]["reference"]


def test_a_resumed_run_repeats_the_bits_of_an_undisturbed_one(run_environment, tmp_path, run_dir):
    """With a lag too the whole state is the adapters'.

    Here in two goes what the fixture does in one.
    """
    directory = tmp_path / "run"
    finish(start(run_environment, directory, [*LORA, "--config.training.steps=2"]))
    output = finish(start(run_environment, directory, [*LORA, "--config.training.steps=3"]))
    assert "after step 2" in output
    assert read_digests(directory, 3) == read_digests(run_dir, 3)
    assert read_records(directory)[3] == read_records(run_dir)[3]


def test_the_export_is_the_base_and_the_product_of_the_adapters(run_environment, tmp_path, run_dir):
    export = tmp_path / "export"
    adapter = tmp_path / "adapter"
    _convert(run_environment, run_dir, export, "--dtype", "float32")
    _convert(run_environment, run_dir, adapter, "--adapter")
    base = _tensors(run_dir / "reference")
    whole = _tensors(export)
    parts = _tensors(adapter, "adapter_model.safetensors")
    assert base.keys() == whole.keys() and len(parts) == 2 * 3 * len(MODULES)
    moved = 0
    for name, value in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in parts:
            product = parts[f"{layer}.lora_B.weight"] @ parts[f"{layer}.lora_A.weight"]
            np.testing.assert_allclose(whole[name], value + 6 / 4 * product, atol=1e-6)
            moved += bool(np.abs(product).max() > 1e-5)
        else:
            np.testing.assert_array_equal(whole[name], value)
    assert moved == 3 * len(MODULES)


def test_a_base_goes_with_its_run_and_a_lost_one_is_named(run_environment, tmp_path, run_dir):
    copied = tmp_path / "copied"
    shutil.copytree(run_dir, copied)
    _convert(run_environment, run_dir, tmp_path / "a", "--adapter")
    _convert(run_environment, copied, tmp_path / "b", "--adapter")
    names = [
        json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("a", "b")
    ]
    bases = [Path(fields["base_model_name_or_path"]) for fields in names]
    assert bases == [run_dir.resolve() / "reference", copied.resolve() / "reference"]
    (copied / "reference").rename(tmp_path / "away")
    meta = SavedAdapters(
        rank=4,
        alpha=6.0,
        targets=("q_proj",),
        base_dtype="float32",
        base_path=str(tmp_path / "gone" / "base"),
    )
    moved = dataclasses.replace(meta, base_path=str(tmp_path / "gone" / "reference"))
    for adapters in (meta, moved):
        with pytest.raises(
            CheckpointError,
            match=f"the base of its adapters, {adapters.base_path}, is not there; put",
        ):
            find_params(copied).base_directory(adapters)


def test_a_run_begins_with_the_adapters_of_peft_and_refuses_those_of_another_base(
    run_environment, tmp_path, run_dir
):
    adapter = tmp_path / "adapter"
    base = tmp_path / "base"
    _convert(run_environment, run_dir, adapter, "--adapter")
    shutil.copytree(run_dir / "reference", base)
    settings = [
        f"--config.model.path={base}",
        f"--config.model.tokenizer={run_dir / 'tokenizer'}",
        "--config.warmup.steps=0",
        f"--config.model.adapter={adapter}",
        "--config.model.lora_base=float32",
    ]
    one_step = [*settings, "--config.training.steps=1"]
    finish(start(run_environment, tmp_path / "on", one_step))
    assert read_digests(tmp_path / "on", 0)["params"] == read_digests(run_dir, 3)["params"]
    assert not (tmp_path / "on" / "reference").exists()

    # One number of the base is another: no fresh run begins with the adapters, and none goes on.
    # The dry run reads the vectors and the matrices' first rows.
    from safetensors.flax import load_file, save_file

    tensors = load_file(base / "model.safetensors")
    for name, place, mode in (
        ("model.norm.weight", 3, ["--dry-run"]),
        ("model.embed_tokens.weight", (-1, -1), []),
    ):
        changed = {**tensors, name: tensors[name].at[place].add(0.5)}
        save_file(changed, base / "model.safetensors", metadata={"format": "pt"})
        output = finish(start(run_environment, tmp_path / "no", [*one_step, *mode]), 2)
        assert f"config.model.adapter: {adapter} was trained on another base than {base}" in output
    output = finish(
        start(run_environment, tmp_path / "on", [*settings, "--config.training.steps=2"]), 2
    )
    assert f"{base}: ['embedding'] is not what the run began with" in output
    output = _convert(run_environment, tmp_path / "on", tmp_path / "e", code=2)
    assert "is not what the adapters of" in output and "Traceback" not in output

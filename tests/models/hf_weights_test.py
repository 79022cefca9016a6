"""Safetensors in and out: the same bytes, and the same model in transformers.

Also what damaged directories get.
"""

import contextlib
import dataclasses
import json
import re
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from dcmdp_jax.models import hf_manifest, hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.hf_config import from_hf, read_model_config, to_hf
from dcmdp_jax.models.hf_manifest import check_manifest, check_values
from dcmdp_jax.models.hf_weights import iterate_hf_tensors, load_params, save_params
from dcmdp_jax.models.params import hf_tensors, init_params, num_params, param_shapes
from dcmdp_jax.parallel.mesh import make_mesh
from tests.support.refusals import refused
from tests.support.runs import ROOT

CONFIG = ModelConfig("qwen3", 11, 8, 12, 2, 4, 2, 4)
TIED = ModelConfig("qwen2", 11, 8, 12, 2, 2, 1, 4, tie_word_embeddings=True, attention_bias=True)
LLAMA = ModelConfig("llama", 11, 8, 12, 2, 2, 1, 4, attention_bias=True)


def _tensors(config, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=place.shape).astype(dtype)
        for name, place in hf_tensors(config).items()
    }


def _write(directory, config, tensors, *, shards=1):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(to_hf(config, dtype="float32")))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return directory


def _assert_same_bytes(have, want):
    assert have.keys() == want.keys()
    for name, value in want.items():
        assert (have[name].dtype, have[name].shape) == (value.dtype, value.shape), name
        assert have[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_and_shapes_are_those_of_transformers(hf_model, family, tied):
    model = hf_model(family, tied=tied, bias=True)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config = from_hf(model.config.to_dict())
    assert {name: place.shape for name, place in hf_tensors(config).items()} == expected
    places = {(place.path, place.index) for place in hf_tensors(config).values()}
    assert len(places) == len(expected)


def test_layers_are_stacked_and_matrices_transposed(tmp_path):
    tensors = _tensors(CONFIG)
    params = load_params(_write(tmp_path / "m", CONFIG, tensors), CONFIG, dtype="float32")
    assert jax.tree.structure(params) == jax.tree.structure(param_shapes(CONFIG))
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        mine = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
        np.testing.assert_array_equal(
            mine["attention"]["k"]["kernel"], tensors[f"{prefix}.self_attn.k_proj.weight"].T
        )
        np.testing.assert_array_equal(
            mine["mlp"]["down"]["kernel"], tensors[f"{prefix}.mlp.down_proj.weight"].T
        )
        np.testing.assert_array_equal(
            mine["mlp_norm"]["scale"], tensors[f"{prefix}.post_attention_layernorm.weight"]
        )
        np.testing.assert_array_equal(
            mine["attention_norm"]["scale"], tensors[f"{prefix}.input_layernorm.weight"]
        )
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["output"], tensors["lm_head.weight"].T)


@pytest.mark.parametrize("config", [CONFIG, TIED, LLAMA], ids=["untied", "tied", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_export_of_an_import_is_the_identity(tmp_path, config, dtype, shards):
    tensors = _tensors(config, jnp.dtype(dtype))
    source = _write(tmp_path / "in", config, tensors, shards=shards)
    params = load_params(source, config, dtype=dtype)
    _assert_same_bytes(dict(iterate_hf_tensors(params, config, dtype)), tensors)
    save_params(params, config, tmp_path / "out", dtype=dtype)
    _assert_same_bytes(load_file(tmp_path / "out" / "model.safetensors"), tensors)
    assert read_model_config(tmp_path / "out") == config


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_source_dtypes(tmp_path, stored):
    tensors = _tensors(CONFIG, stored)
    source = _write(tmp_path / "m", CONFIG, tensors)
    wide = dict(iterate_hf_tensors(load_params(source, CONFIG, dtype="float32"), CONFIG, "float32"))
    _assert_same_bytes(wide, {name: value.astype(np.float32) for name, value in tensors.items()})
    narrow = dict(
        iterate_hf_tensors(load_params(source, CONFIG, dtype="bfloat16"), CONFIG, "bfloat16")
    )
    _assert_same_bytes(
        narrow, {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}
    )


def test_narrowing_rounds_to_nearest_even(tmp_path):
    tensors = _tensors(CONFIG)
    # bfloat16 has 8 bits: 1 + 1/256 lies between 1 and 1 + 1/128, and goes to even; truncation
    # gives 1 both times.
    tensors["model.norm.weight"] = np.array(
        [1 + 1 / 256, 1 + 3 / 256, 1 + 1.5 / 256, 0, 0, 0, 0, 0], np.float32
    )
    expected = [1.0, 1 + 4 / 256, 1 + 2 / 256]
    source = _write(tmp_path / "m", CONFIG, tensors)
    at_load = load_params(source, CONFIG, dtype="bfloat16")["norm"]["scale"]
    np.testing.assert_array_equal(np.asarray(at_load, np.float32)[:3], expected)
    exact = load_params(source, CONFIG, dtype="float32")
    at_save = dict(iterate_hf_tensors(exact, CONFIG, "bfloat16"))["model.norm.weight"]
    np.testing.assert_array_equal(at_save.astype(np.float32)[:3], expected)


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", True), ("qwen3", False)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_an_export_with_the_same_logits(
    hf_directory, tmp_path, family, tied, dtype
):
    torch = pytest.importorskip("torch", reason="torch is in the development extra")
    transformers = pytest.importorskip(
        "transformers", reason="transformers is in the development extra"
    )
    model, source = hf_directory(family, tied=tied, bias=True, rope="yarn")
    config = read_model_config(source)
    params = load_params(source, config, dtype="float32")
    # 30 kB: several files, some with one tensor larger than that.
    save_params(params, config, tmp_path / "out", dtype=dtype, max_shard_bytes=30_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert again.dtype == getattr(torch, dtype)
    # Saved and loaded too: Module.to() would round the rotary frequencies as well.
    model.to(again.dtype).save_pretrained(tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        want = model(ids).logits
        have = again(ids).logits
    assert torch.equal(have, want)


def test_sharded_directories_of_transformers(hf_directory):
    model, source = hf_directory("qwen3", max_shard_size="40kB")
    assert len(list(source.glob("*.safetensors"))) > 3
    config = read_model_config(source)
    manifest = check_manifest(source, config)
    assert manifest.dtypes == {"F32": len(hf_tensors(config))}
    assert manifest.num_bytes == 4 * num_params(config)
    exported = dict(
        iterate_hf_tensors(load_params(source, config, dtype="float32"), config, "float32")
    )
    _assert_same_bytes(
        exported, {name: value.detach().numpy() for name, value in model.named_parameters()}
    )


def test_shard_files_and_index(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    save_params(params, CONFIG, tmp_path / "out", dtype="float32", max_shard_bytes=1000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * num_params(CONFIG)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    sizes = [
        sum(value.nbytes for value in load_file(tmp_path / "out" / file).values()) for file in files
    ]
    assert sum(sizes) == 4 * num_params(CONFIG)
    assert max(sizes) <= 1000
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_load_onto_a_mesh(tmp_path):
    tensors = _tensors(CONFIG)
    source = _write(tmp_path / "m", CONFIG, tensors)
    mesh = make_mesh(2, 2, 2, devices=jax.devices()[:8])
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P()), param_shapes(CONFIG))
    shardings["layers"]["mlp"]["up"]["kernel"] = NamedSharding(mesh, P(None, "fsdp", "tensor"))
    shardings["layers"]["mlp"]["down"]["kernel"] = NamedSharding(mesh, P("data", "tensor", "fsdp"))
    shardings["output"] = NamedSharding(mesh, P(("data", "fsdp", "tensor"), None))
    params = load_params(source, CONFIG, dtype="float32", shardings=shardings)
    jax.tree.map(
        lambda leaf, sharding: leaf.sharding == sharding or pytest.fail(str(leaf.sharding)),
        params,
        shardings,
    )
    assert params["layers"]["mlp"]["up"]["kernel"].addressable_shards[0].data.shape == (2, 4, 6)
    assert params["output"].addressable_shards[0].data.shape == (1, 11)
    _assert_same_bytes(dict(iterate_hf_tensors(params, CONFIG, "float32")), tensors)


def test_numpy_parameters_export_too():
    params = init_params(TIED, jax.random.key(0))
    on_host = jax.tree.map(np.asarray, params)
    for dtype in ("float32", "bfloat16"):
        _assert_same_bytes(
            dict(iterate_hf_tensors(on_host, TIED, dtype)),
            dict(iterate_hf_tensors(params, TIED, dtype)),
        )


def test_loaded_parameters_outlive_their_file(tmp_path):
    tensors = _tensors(CONFIG)
    source = _write(tmp_path / "m", CONFIG, tensors)
    params = load_params(source, CONFIG, dtype="float32")
    path = source / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    _assert_same_bytes(dict(iterate_hf_tensors(params, CONFIG, "float32")), tensors)


# What damaged directories get.


def _refused(source, config, error=ValueError):
    """The message, which the header check must give already: no tensor is read before."""
    with pytest.raises(error) as caught:
        check_manifest(source, config)
    with pytest.raises(error) as again:
        load_params(source, config, dtype="float32")
    assert str(again.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_tensor(tmp_path):
    tensors = _tensors(CONFIG)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    source = _write(tmp_path / "m", CONFIG, tensors)
    file = source / "model.safetensors"
    assert _refused(source, CONFIG) == (
        f"{file}: tensor model.layers.1.mlp.up_proj.weight is missing, expected [12, 8]"
    )
    del tensors["lm_head.weight"]
    source = _write(tmp_path / "n", CONFIG, tensors)
    assert "up_proj.weight is missing and 1 more, expected [12, 8]" in _refused(source, CONFIG)


def test_wrong_shape(tmp_path):
    tensors = _tensors(CONFIG)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((16, 8), np.float32)
    source = _write(tmp_path / "m", CONFIG, tensors)
    assert _refused(source, CONFIG) == (
        f"{source}/model.safetensors: tensor model.layers.0.self_attn.k_proj.weight is [16, 8], "
        "expected [8, 8] by config.json"
    )


def test_unknown_tensor(tmp_path):
    tensors = _tensors(CONFIG) | {"model.layers.1.self_attn.q_proj.bias": np.zeros(8, np.float32)}
    source = _write(tmp_path / "m", CONFIG, tensors)
    assert _refused(source, CONFIG) == (
        f"{source}/model.safetensors: tensor model.layers.1.self_attn.q_proj.bias is unknown to "
        "qwen3 with this config.json"
    )


@pytest.mark.parametrize("layers", [1, 3, 10_000])
def test_another_number_of_layers(tmp_path, layers):
    source = _write(tmp_path / "m", CONFIG, _tensors(CONFIG))
    message = _refused(source, dataclasses.replace(CONFIG, num_layers=layers))
    assert message.startswith(
        f"{source}/config.json: num_hidden_layers is {layers}, the safetensors files hold 2 "
        "layers (model.layers.1."
    )


def test_names_of_another_family(tmp_path):
    tensors = {name.removeprefix("model."): value for name, value in _tensors(CONFIG).items()}
    source = _write(tmp_path / "m", CONFIG, tensors)
    assert "holds no tensor model.layers.0..., names must be those of" in _refused(source, CONFIG)


# Values.


@pytest.mark.parametrize(("value", "said"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_that_are_not_finite_are_placed(tmp_path, stored, value, said):
    tensors = _tensors(CONFIG, stored)
    # Of [16, 8] = 128 values two; the first in reading order is at [3, 5].
    tensors["model.layers.1.self_attn.q_proj.weight"][3, 5] = value
    tensors["model.layers.1.self_attn.q_proj.weight"][7, 0] = np.nan
    source = _write(tmp_path / "m", CONFIG, tensors, shards=2)
    file = next(
        path
        for path in source.glob("*.safetensors")
        if "model.layers.1.self_attn.q_proj.weight" in load_file(path)
    )
    expected = (
        f"{file}: tensor model.layers.1.self_attn.q_proj.weight has a value that is not finite: "
        f"{said} at [3, 5]; the weights are damaged, fetch or export them again"
    )
    for dtype in ("float32", "bfloat16"):
        assert refused(load_params, source, CONFIG, dtype=dtype) == expected
    assert refused(check_values, check_manifest(source, CONFIG)) == expected


def test_a_value_that_narrowing_makes_infinite_is_refused(tmp_path):
    # The largest bfloat16 is (2 - 2^-7) 2^127 = 3.39e38; 3.4e38 is nearer to 2^128, and a finite
    # float32.
    tensors = _tensors(CONFIG)
    tensors["model.norm.weight"][2] = 3.4e38
    source = _write(tmp_path / "m", CONFIG, tensors)
    load_params(source, CONFIG, dtype="float32")
    with pytest.raises(
        ValueError, match=r"norm.weight .* too large for bfloat16: 3.39\d*e\+38 at \[2\]"
    ):
        load_params(source, CONFIG, dtype="bfloat16")


def test_a_large_tensor_is_checked_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(hf_manifest, "_BLOCK", 5)
    monkeypatch.setattr(hf_manifest, "_READ", 17)  # two rows of 8
    tensors = _tensors(CONFIG)
    tensors["lm_head.weight"][10, 7] = np.nan  # the last value of all
    source = _write(tmp_path / "m", CONFIG, tensors)
    with pytest.raises(
        ValueError, match=r"lm_head.weight has a value that is not finite: nan at \[10, 7\]"
    ):
        load_params(source, CONFIG, dtype="float32")


def test_a_shard_of_a_mesh_finds_what_is_not_finite_in_the_whole_tensor(tmp_path):
    tensors = _tensors(CONFIG)
    tensors["lm_head.weight"][10, 7] = np.nan
    source = _write(tmp_path / "m", CONFIG, tensors)
    mesh = make_mesh(1, 8, 1, devices=jax.devices()[:8])
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, P()), param_shapes(CONFIG))
    shardings["output"] = NamedSharding(mesh, P("fsdp", None))
    with pytest.raises(
        ValueError, match=r"lm_head.weight has a value that is not finite: nan at \[10, 7\]"
    ):
        load_params(source, CONFIG, dtype="float32", shardings=shardings)


def test_parameters_that_are_not_finite_are_not_exported(tmp_path):
    params = init_params(TIED, jax.random.key(0))
    params["norm"]["scale"] = params["norm"]["scale"].at[3].set(jnp.nan)
    with pytest.raises(
        ValueError,
        match=r"^params: tensor model.norm.weight has 1 value\(s\) of 8 that are not finite",
    ):
        save_params(params, TIED, tmp_path / "out", dtype="bfloat16")
    assert not list(tmp_path.iterdir())


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    source = _write(tmp_path / "m", CONFIG, _tensors(CONFIG))
    (source / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    assert "a Git LFS pointer, `git lfs pull` fetches the file" in _refused(source, CONFIG)


def test_unreadable_dtype(tmp_path):
    tensors = _tensors(CONFIG)
    tensors["model.norm.weight"] = np.zeros(8, np.int8)
    source = _write(tmp_path / "m", CONFIG, tensors)
    assert _refused(source, CONFIG).endswith(
        "tensor model.norm.weight is I8, readable are F32, BF16, F16"
    )


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(tmp_path, keep):
    source = _write(tmp_path / "m", CONFIG, _tensors(CONFIG), shards=2)
    file = source / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert _refused(source, CONFIG).startswith(f"{file}: truncated or not a safetensors file (")


@contextlib.contextmanager
def _file_size_limit(num_bytes):
    """As `ulimit -f` has it: a write beyond fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("limit", "file"), [(1000, "model.safetensors"), (100, "config.json")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, limit, file):
    """config.json has about 600 bytes."""
    params = init_params(CONFIG, jax.random.key(0))
    with _file_size_limit(limit), pytest.raises(OSError, match="File too large") as caught:
        save_params(params, CONFIG, tmp_path / "out", dtype="float32")
    # What a command prints in one line.
    assert caught.value.filename is not None or caught.value.errno is None
    assert re.search(rf"{tmp_path}/\.out\.partial-\w+/{file}\b", str(caught.value))
    assert not any(tmp_path.iterdir())


@contextlib.contextmanager
def _writing(directory):
    """Write a file of the directory's new content; a kill within leaves what is there."""
    with hf_weights.whole_directory(directory, overwrite=True) as partial:
        (partial / "file").write_text("new")
        yield partial


_DIES = """
import os, sys
from pathlib import Path
from dcmdp_jax.models import hf_weights
step, directory = sys.argv[1], Path(sys.argv[2])
renames = []
def counted(self, target, rename=Path.rename):
    if step == "renamed" and renames:
        os._exit(9)
    renames.append(target)
    return rename(self, target)
Path.rename = counted
if step == "renamed":
    hf_weights._EXCHANGE = 1 << 20  # as where two names can't be exchanged
with hf_weights.whole_directory(directory, overwrite=True) as partial:
    (partial / "file").write_text("new")
    if step == "written":
        os._exit(9)
"""


@pytest.mark.parametrize("step", ["written", "renamed"])
def test_what_a_killed_writer_leaves_is_removed_and_the_old_directory_comes_back(tmp_path, step):
    """A writer is killed before a rename, or between the two of it.

    A file system that can't exchange names has two renames.
    """
    directory = tmp_path / "model[1]"
    directory.mkdir()
    (directory / "file").write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", _DIES, step, str(directory)], cwd=ROOT, check=False
    )
    assert done.returncode == 9 and len(list(tmp_path.iterdir())) == 2
    with (
        pytest.raises(FileExistsError, match="is not empty"),
        hf_weights.whole_directory(directory, overwrite=False),
    ):
        pytest.fail("the old directory is there again")
    assert (directory / "file").read_text() == "old"
    with _writing(directory):
        pass
    assert (directory / "file").read_text() == "new" and list(tmp_path.iterdir()) == [directory]


def test_a_directory_that_another_process_is_writing_is_left_to_it(tmp_path):
    with _writing(tmp_path / "model") as first, _writing(tmp_path / "model") as second:
        assert first.is_dir() and first != second
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_old_directory_is_there_until_the_new_one_is(tmp_path, monkeypatch):
    """One system call exchanges them: Path.rename, of which there were two, is not called."""
    with _writing(tmp_path / "model"):
        pass
    monkeypatch.setattr(
        hf_weights.Path, "rename", lambda *_: pytest.fail("the old directory is moved away")
    )
    with _writing(tmp_path / "model") as partial:
        (partial / "file").write_text("newer")
    assert (tmp_path / "model" / "file").read_text() == "newer" and len(
        list(tmp_path.iterdir())
    ) == 1


def test_the_files_of_a_model_may_be_read_by_whom_the_directory_may(tmp_path):
    save_params(init_params(CONFIG, jax.random.key(0)), CONFIG, tmp_path / "out", dtype="float32")
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()}
    assert set(modes.values()) == {oct((tmp_path / "out").stat().st_mode & 0o666)}, modes


def test_index_against_files(tmp_path):
    source = _write(tmp_path / "m", CONFIG, _tensors(CONFIG), shards=2)
    index = source / "model.safetensors.index.json"
    second = source / "model-00002-of-00002.safetensors"
    intact = index.read_text()
    weight_map = json.loads(intact)["weight_map"]
    here = [name for name, file in weight_map.items() if file == second.name]

    moved = weight_map | {here[0]: "model-00001-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": moved}))
    assert _refused(source, CONFIG) == (
        f"{source}/model-00001-of-00002.safetensors: tensor {here[0]} is missing, "
        "model.safetensors.index.json says it is here"
    )
    index.write_text(
        json.dumps(
            {"weight_map": {name: file for name, file in weight_map.items() if name != here[0]}}
        )
    )
    assert (
        _refused(source, CONFIG)
        == f"{second}: tensor {here[0]} is unknown to model.safetensors.index.json"
    )
    index.write_text(intact)
    second.unlink()
    assert _refused(source, CONFIG) == (
        f"{index}: tensor {here[0]} is said to be in model-00002-of-00002.safetensors, which is "
        "missing"
    )
    for shard in (
        "../m/model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "x/../../m/a.safetensors",
    ):
        index.write_text(json.dumps({"weight_map": weight_map | {here[0]: shard}}))
        assert _refused(source, CONFIG) == (
            f"{index}: tensor {here[0]} is said to be in {shard!r}, outside the directory; name "
            "files inside it"
        )
    for text, reason in (
        ("{", "not valid JSON"),
        ("{}", "has no weight_map"),
        ("[]", "holds a list, must hold a JSON object"),
        ('{"weight_map": {"a": 1}}', "weight_map must map tensor names to file names"),
    ):
        index.write_text(text)
        assert _refused(source, CONFIG).startswith(f"{index}: {reason}")


def test_no_weights(tmp_path):
    message = _refused(tmp_path, CONFIG, FileNotFoundError)
    assert message == f"{tmp_path}: has neither model.safetensors nor model.safetensors.index.json"


def test_redundant_head_of_a_tied_model(tmp_path):
    tensors = _tensors(TIED)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    source = _write(tmp_path / "same", TIED, tensors | head)
    assert check_manifest(source, TIED).redundant_head == source / "model.safetensors"
    _assert_same_bytes(
        dict(iterate_hf_tensors(load_params(source, TIED, dtype="float32"), TIED, "float32")),
        tensors,
    )

    source = _write(
        tmp_path / "other", TIED, tensors | {"lm_head.weight": head["lm_head.weight"] + 1}
    )
    with pytest.raises(
        ValueError,
        match=r"lm_head.weight differs from model.embed_tokens.weight, but config.json ties",
    ):
        load_params(source, TIED, dtype="float32")


def test_dtype_is_checked(tmp_path):
    params = init_params(TIED, jax.random.key(0))
    for call in (
        lambda: load_params(tmp_path, TIED, dtype="float16"),
        lambda: next(iterate_hf_tensors(params, TIED, "float16")),
        lambda: save_params(params, TIED, tmp_path / "out", dtype="float16"),
    ):
        with pytest.raises(
            ValueError, match="^dtype: got 'float16', allowed are float32, bfloat16$"
        ):
            call()


def test_parameters_of_another_model_are_refused(tmp_path):
    params = init_params(TIED, jax.random.key(0))
    with pytest.raises(
        ValueError,
        match=r"^params: layers\.attention\.k\.bias has shape \(2, 4\), the model has no",
    ):
        save_params(params, CONFIG, tmp_path / "out", dtype="float32")
    wrong = params | {"embedding": params["embedding"][:-1]}
    with pytest.raises(
        ValueError, match=r"^params: embedding has shape \(10, 8\), the model has \(11, 8\)$"
    ):
        save_params(wrong, TIED, tmp_path / "out", dtype="float32")
    assert not list(tmp_path.iterdir())  # nothing half written stays behind


# Writing a directory.


def test_a_directory_that_holds_something_is_refused(tmp_path):
    params = init_params(TIED, jax.random.key(0))
    out = tmp_path / "deep" / "out"
    save_params(params, TIED, out, dtype="float32")
    before = load_file(out / "model.safetensors")
    other = init_params(TIED, jax.random.key(1))
    with pytest.raises(
        FileExistsError, match="is not empty, choose another directory, or --overwrite"
    ):
        save_params(other, TIED, out, dtype="float32")
    _assert_same_bytes(load_file(out / "model.safetensors"), before)
    (out / "stale.txt").write_text("of the old export")
    save_params(other, TIED, out, dtype="float32", overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    _assert_same_bytes(
        load_file(out / "model.safetensors"), dict(iterate_hf_tensors(other, TIED, "float32"))
    )
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="is a file, choose another directory"):
        save_params(params, TIED, tmp_path / "file", dtype="float32", overwrite=True)
    (tmp_path / "empty").mkdir()
    save_params(params, TIED, tmp_path / "empty", dtype="float32")
    assert read_model_config(tmp_path / "empty") == TIED


def test_a_failure_leaves_the_old_directory(tmp_path, monkeypatch):
    params = init_params(TIED, jax.random.key(0))
    out = tmp_path / "out"
    save_params(params, TIED, out, dtype="float32")
    before = load_file(out / "model.safetensors")

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_params(
            init_params(TIED, jax.random.key(1)), TIED, out, dtype="float32", overwrite=True
        )
    _assert_same_bytes(load_file(out / "model.safetensors"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_tokenizer_files_come_along(tmp_path):
    params = init_params(TIED, jax.random.key(0))
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        save_params(params, TIED, tmp_path / "out", dtype="float32", tokenizer_dir=source)
    contents = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": '{"a": 1}',
        "chat_template.jinja": "{{ x }}",
        "generation_config.json": '{"eos_token_id": [3, 4]}',
        "config.json": json.dumps(
            {"eos_token_id": 3, "pad_token_id": 0, "bos_token_id": None, "vocab_size": 99}
        ),
        "README.md": "not ours to carry",
    }
    for name, text in contents.items():
        (source / name).write_text(text)
    save_params(params, TIED, tmp_path / "out", dtype="bfloat16", tokenizer_dir=source)
    carried = {path.name for path in (tmp_path / "out").iterdir()}
    assert carried == contents.keys() - {"README.md"} | {"model.safetensors"}
    for name in carried - {"config.json", "model.safetensors"}:
        assert (tmp_path / "out" / name).read_text() == contents[name]
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (fields["eos_token_id"], fields["pad_token_id"], fields["vocab_size"]) == (3, 0, 11)
    assert "bos_token_id" not in fields
    assert fields["torch_dtype"] == "bfloat16"
    # A run's directory of the tokenizer has no config.json.
    (source / "config.json").unlink()
    save_params(params, TIED, tmp_path / "exported", dtype="bfloat16", tokenizer_dir=source)
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["eos_token_id"] == [3, 4]

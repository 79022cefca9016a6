"""Malformed model directories and data files: one line with the file, the field or tensor, and the
value, before the tokenizer is loaded, and long before anything is allocated.
"""

import json
import shutil
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import demo
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.tokenizer import end_token_ids
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.hf_config import read_model_config
from dcmdp_jax.models.hf_manifest import check_manifest, check_values
from dcmdp_jax.models.hf_weights import load_params, save_params
from dcmdp_jax.models.lora import Adapter, adapter_declarations, save_adapter
from dcmdp_jax.models.params import draw_params, init_params
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.run import placement
from dcmdp_jax.run import task as run_task
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.task import read_model
from dcmdp_jax.run.weights import Weights
from tests.support.refusals import refused

_MODEL = ModelConfig("qwen3", 104, 16, 32, 2, 4, 2, 8, max_position_embeddings=256)
_NORM = "model.layers.1.input_layernorm.weight"
_QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "whole"
    save_params(init_params(_MODEL, jax.random.key(0)), _MODEL, directory, dtype="float32")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _text(text):
    return lambda directory: (directory / "config.json").write_bytes(
        text if isinstance(text, bytes) else text.encode()
    )


def _fields(**changes):
    def apply(directory):
        path = directory / "config.json"
        fields = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({name: value for name, value in fields.items() if value is not _ABSENT})
        )

    return apply


_ABSENT = object()


def _tensors(change):
    def apply(directory):
        tensors = dict(load_file(directory / "model.safetensors"))
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    return apply


def _without(name):
    return _tensors(lambda tensors: tensors.pop(name))


def _with(name, value):
    return _tensors(lambda tensors: tensors.update({name: value}))


def _file(data):
    return lambda directory: (directory / "model.safetensors").write_bytes(data)


def _index(text):
    def apply(directory):
        (directory / "model.safetensors").rename(directory / "shard.safetensors")
        (directory / "model.safetensors.index.json").write_text(text)

    return apply


def _header(fields):
    text = json.dumps(fields).encode()
    return _file(len(text).to_bytes(8, "little") + text)


_DIRECTORIES = {
    # config.json as a file.
    "empty": (_text(""), ["config.json: not valid JSON"]),
    "cut": (_text('{"model_type": "qwen3",'), ["config.json: not valid JSON"]),
    "not_utf8": (_text(b'\xff\xfe{"a": 1}'), ["config.json: not valid JSON"]),
    "list": (_text("[1, 2]"), ["config.json: holds a list, must hold a JSON object"]),
    "text": (_text('"qwen3"'), ["config.json: holds a string, must hold a JSON object"]),
    "null": (_text("null"), ["config.json: holds null, must hold a JSON object"]),
    "number": (_text("17"), ["config.json: holds a number, must hold a JSON object"]),
    "too_deep": (
        _text('{"a":' + "[" * 100_000),
        ["config.json: not valid JSON (maximum recursion depth exceeded"],
    ),
    "digits_without_end": (
        _text('{"hidden_size": ' + "9" * 10_000 + "}"),
        ["config.json: not valid JSON", "4300"],
    ),
    "absent": (
        lambda directory: (directory / "config.json").unlink(),
        ["no config.json, not a Hugging Face model"],
    ),
    # Its fields.
    "no_family": (
        _fields(model_type=_ABSENT),
        ["model_type is None, supported are gemma3_text, llama, mistral"],
    ),
    "family": (_fields(model_type="gemma"), ["model_type is 'gemma', supported are gemma3_text"]),
    "family_list": (_fields(model_type=["qwen3"]), ["model_type is ['qwen3'], supported"]),
    "family_long": (
        _fields(model_type="x" * 10**6),
        ["model_type is 'xxx", "... (1,000,000 characters), supported"],
    ),
    "activation": (_fields(hidden_act="gelu"), ["hidden_act is 'gelu', only 'silu'"]),
    "sliding": (
        _fields(use_sliding_window=True),
        ["use_sliding_window is true, only full attention"],
    ),
    "no_layers": (
        _fields(num_hidden_layers=_ABSENT),
        ["num_hidden_layers is missing, must be a number"],
    ),
    "null_layers": (
        _fields(num_hidden_layers=None),
        ["num_hidden_layers is null, must be a number"],
    ),
    "zero_layers": (
        _fields(num_hidden_layers=0),
        ["num_hidden_layers is 0, must be a whole number in [1, 10000]"],
    ),
    "half_layers": (
        _fields(num_hidden_layers=1.5),
        ["num_hidden_layers is 1.5, must be a whole number"],
    ),
    "text_layers": (
        _fields(num_hidden_layers="2"),
        ["num_hidden_layers is '2', must be a whole number"],
    ),
    "true_layers": (
        _fields(num_hidden_layers=True),
        ["num_hidden_layers is True, must be a whole number"],
    ),
    "billion_layers": (
        _fields(num_hidden_layers=10**9),
        ["num_hidden_layers is 1000000000, must be", "10000]"],
    ),
    "negative_width": (_fields(hidden_size=-16), ["hidden_size is -16, must be a whole number"]),
    "billion_width": (_fields(hidden_size=10**9), ["is [104, 16], expected [104, 1000000000]"]),
    "product": (
        _fields(hidden_size=10**9, intermediate_size=10**9),
        [
            "hidden_size 1000000000, intermediate_size 1000000000 and 2 layers make 6e+18 "
            "parameters, more than 1e+13"
        ],
    ),
    "wider_than_int32": (
        _fields(hidden_size=2**31),
        ["hidden_size is 2147483648, must be", "2147483647]"],
    ),
    "huge_vocabulary": (
        _fields(vocab_size=10**400),
        ["vocab_size is 1000", "must be a whole number in [1, 2147483647]"],
    ),
    "infinite_mlp": (
        _fields(intermediate_size=float("inf")),
        ["intermediate_size is inf, must be a whole number"],
    ),
    "zero_heads": (
        _fields(num_attention_heads=0),
        ["num_attention_heads is 0, must be a whole number"],
    ),
    "heads_not_multiple": (
        _fields(num_attention_heads=3),
        ["num_attention_heads is 3", "num_key_value_heads=2"],
    ),
    "more_kv_heads": (
        _fields(num_key_value_heads=8),
        ["num_attention_heads is 4", "num_key_value_heads=8"],
    ),
    "odd_head_dim": (_fields(head_dim=7), ["head_dim is 7, must be even"]),
    "zero_head_dim": (_fields(head_dim=0), ["head_dim is 0, must be a whole number in [2"]),
    "underivable_head_dim": (
        _fields(head_dim=None, hidden_size=18),
        ["hidden_size is 18", "num_attention_heads=4"],
    ),
    "zero_theta": (_fields(rope_theta=0), ["rope_theta is 0, must be a number in"]),
    "negative_theta": (_fields(rope_theta=-1e4), ["rope_theta is -10000.0, must be a number in"]),
    "nan_theta": (_fields(rope_theta=float("nan")), ["rope_theta is nan, must be a number in"]),
    "text_theta": (_fields(rope_theta="1e4"), ["rope_theta is '1e4', must be a number in"]),
    "zero_eps": (_fields(rms_norm_eps=0.0), ["rms_norm_eps is 0.0, must be a number in"]),
    "negative_eps": (_fields(rms_norm_eps=-1e-6), ["rms_norm_eps is -1e-06, must be a number in"]),
    "infinite_eps": (
        _fields(rms_norm_eps=float("inf")),
        ["rms_norm_eps is inf, must be a number in"],
    ),
    "no_context": (
        _fields(max_position_embeddings=0),
        ["max_position_embeddings is 0, must be a whole number"],
    ),
    "tied_text": (
        _fields(tie_word_embeddings="no"),
        ["tie_word_embeddings is 'no', must be true or false"],
    ),
    "rope_list": (_fields(rope_scaling=[1]), ["rope_scaling is [1], must be an object or null"]),
    "rope_kind": (
        _fields(rope_scaling={"rope_type": "longrope"}),
        ["rope_type is 'longrope', supported are"],
    ),
    "rope_factor": (
        _fields(rope_scaling={"rope_type": "yarn", "factor": -4}),
        ["factor is -4, must be a number"],
    ),
    "rope_missing": (
        _fields(rope_scaling={"rope_type": "yarn"}),
        ["rope_scaling of type 'yarn' needs", "'factor'"],
    ),
    "rope_nan": (
        _fields(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": float("nan")}),
        ["rope_theta is nan, must be a number"],
    ),
    # config.json against the tensors.
    "one_layer_more": (
        _fields(num_hidden_layers=3),
        ["num_hidden_layers is 3, the safetensors files hold 2 layers"],
    ),
    "one_layer_fewer": (
        _fields(num_hidden_layers=1),
        ["num_hidden_layers is 1, the safetensors files hold 2 layers"],
    ),
    "other_width": (_fields(hidden_size=32), ["is [104, 16], expected [104, 32] by config.json"]),
    "other_vocabulary": (
        _fields(vocab_size=103),
        ["is [104, 16], expected [103, 16] by config.json"],
    ),
    "other_mlp": (_fields(intermediate_size=48), ["mlp.", "48", "by config.json"]),
    "other_heads": (_fields(num_attention_heads=8), ["self_attn.", "64", "by config.json"]),
    "other_head_dim": (_fields(head_dim=16), ["self_attn.", "by config.json"]),
    "other_kv_heads": (
        _fields(num_key_value_heads=4),
        ["_proj.weight is [16, 16], expected [32, 16]"],
    ),
    "other_family": (_fields(model_type="qwen2"), ["q_proj.bias is missing"]),
    "biases": (_fields(attention_bias=True), ["bias is missing"]),
    "tied": (
        _fields(tie_word_embeddings=True),
        ["lm_head.weight differs from model.embed_tokens.weight"],
    ),
    "no_head": (
        _without("lm_head.weight"),
        ["tensor lm_head.weight is missing", "set tie_word_embeddings to true"],
    ),
    "no_norm": (_without(_NORM), [f"tensor {_NORM} is missing, expected [16]"]),
    "stray": (
        _with("model.rotary.inv_freq", np.ones(4, np.float32)),
        ["model.rotary.inv_freq is unknown to qwen3"],
    ),
    "stray_long": (
        _with("x" * 10**5, np.ones(4, np.float32)),
        ["tensor xxx", "... (100,000 characters) is unknown"],
    ),
    "integers": (
        _with(_NORM, np.ones(16, np.int32)),
        [f"tensor {_NORM} is I32, readable are F32, BF16, F16"],
    ),
    "transposed": (
        _with(_QUERY, np.ones((16, 32), np.float32)),
        ["is [16, 32], expected [32, 16]"],
    ),
    "scalar": (_with(_NORM, np.array(1.0, np.float32)), [f"tensor {_NORM} is [], expected [16]"]),
    # The files themselves.
    "no_file": (
        lambda directory: (directory / "model.safetensors").unlink(),
        ["has neither model.safetensors nor"],
    ),
    "empty_file": (_file(b""), ["model.safetensors: truncated or not a safetensors file"]),
    "not_safetensors": (
        _file(b"PK\x03\x04" * 100),
        ["model.safetensors: truncated or not a safetensors file"],
    ),
    "lfs_pointer": (
        _file(b"version https://git-lfs.github.com/spec/v1\n"),
        ["a Git LFS pointer, `git lfs pull`"],
    ),
    "lying_header": (
        _header({"a": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}),
        ["model.safetensors: truncated or not a safetensors file"],
    ),
    "no_tensors": (_header({}), ["holds no tensor model.layers.0..."]),
    "index_deep": (
        _index('{"a":' * 100_000),
        ["index.json: not valid JSON (maximum recursion depth exceeded"],
    ),
    "index_list": (_index("[]"), ["index.json: holds a list, must hold a JSON object"]),
    "index_empty": (_index("{}"), ["index.json: has no weight_map"]),
    "index_numbers": (
        _index('{"weight_map": {"a": 1}}'),
        ["weight_map must map tensor names to file names"],
    ),
    "index_shard": (
        _index('{"weight_map": {"a": "none.safetensors"}}'),
        ["is said to be in none.safetensors, which is"],
    ),
}

# Found when the tensors are read.
_VALUES = {
    "nan": (
        _with(_NORM, np.full(16, np.nan, np.float32)),
        [f"tensor {_NORM} has a value that is not finite: nan at [0]"],
    ),
    "infinite": (
        _with(_NORM, np.array([1] * 15 + [np.inf], np.float32)),
        [_NORM, "not finite: inf at [15]"],
    ),
    "half_nan": (
        _with(_NORM, np.array([np.nan] + [1] * 15, np.float16)),
        [_NORM, "not finite: nan at [0]"],
    ),
}


def _broken(whole, tmp_path, change):
    directory = tmp_path / "model"
    shutil.copytree(whole, directory)
    change(directory)
    return directory


def _one_line(caught, directory, words):
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700 and str(directory) in message
    assert all(word in message for word in words), message
    assert "tokenizer" not in message


@pytest.mark.parametrize("name", _DIRECTORIES)
def test_a_malformed_directory_is_named_before_the_tokenizer_is_touched(
    whole, tmp_path, monkeypatch, name
):
    change, words = _DIRECTORIES[name]
    directory = _broken(whole, tmp_path, change)
    monkeypatch.setattr(
        run_task, "load_tokenizer", lambda *_: pytest.fail("the tokenizer was loaded")
    )
    monkeypatch.setattr(
        run_task, "load_problems", lambda *_, **__: pytest.fail("the problems were loaded")
    )
    config = demo.get_config("debug")
    config.run_dir, config.model.path = str(tmp_path / "run"), str(directory)
    if name == "tied":
        # Which values differ is known when they are read.
        with pytest.raises(ValueError) as caught:
            load_params(directory, read_model_config(directory), dtype="float32")
    else:
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            Run.check(from_config_dict(config))
    _one_line(caught, directory, words)


@pytest.mark.parametrize("name", _VALUES)
def test_values_that_are_not_finite_are_named_by_every_reader(whole, tmp_path, name):
    change, words = _VALUES[name]
    directory = _broken(whole, tmp_path, change)
    for read in (
        lambda: load_params(directory, _MODEL, dtype="bfloat16"),
        lambda: check_values(check_manifest(directory, _MODEL)),
    ):
        with pytest.raises(ValueError) as caught:
            read()
        _one_line(caught, directory, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "generation_config.json: not valid JSON (maximum recursion depth exceeded"),
        ("{", "generation_config.json: not valid JSON"),
        ("[]", "generation_config.json: holds a list, must hold a JSON object"),
        ('{"eos_token_id": "3"}', "eos_token_id is '3', must be a token id or a list of them"),
        ('{"eos_token_id": true}', "eos_token_id is True, must be a token id or a list of them"),
        (
            '{"eos_token_id": [3, -1]}',
            "eos_token_id is [3, -1], must be a token id or a list of them",
        ),
        ('{"eos_token_id": 2.5}', "eos_token_id is 2.5, must be a token id or a list of them"),
        ('{"eos_token_id": 1' + "0" * 20 + "}", "eos_token_id is 1000"),
    ],
)
def test_a_malformed_generation_config_is_named(tmp_path, text, words):
    class Tokenizer:
        eos_token_id = 3

    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        end_token_ids(Tokenizer(), tmp_path, vocab_size=10)
    assert (
        str(tmp_path) in str(caught.value)
        and words in str(caught.value)
        and len(str(caught.value)) < 400
    )


_LONG = "7" * 10**6


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "answer": "{" + _LONG}, "more than"),
        ({"prompt": "p", "answer": r"\frac{" + "7" * 300}, "... (306 characters)"),
        (
            {"prompt": "p", "answer": [_LONG]},
            "the answer has 1000000 characters, more than 2000: '777",
        ),
        ({"prompt": "p", "final_answer": [_LONG, "2"]}, "must be a list of one text, not ['777"),
        (
            {"prompt": "p", "final_answer": ["2"], "error": "x" * 10**6},
            "... (1,000,000 characters), not a number",
        ),
        ({"prompt": "p", "answer": "５"}, "the answer '５' has the digit '５', write 5"),
        ({"prompt": "p", "answer": "1٣"}, "the answer '1٣' has the digit '٣', write 3"),
        ({"prompt": "p", "answer": r"\frac{१}{2}"}, "write 1"),
        (
            {"prompt": "p", "final_answer": ["2"], "error": "０.１"},
            "field 'error' is '０.１', not a number",
        ),
    ],
)
def test_a_bad_row_is_quoted_shortly_and_digits_of_other_scripts_are_refused(tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    message = refused(load_problems, str(path))
    assert message.startswith(f"{path}:1: ") and words in message and len(message) < 400


@pytest.mark.parametrize("blank", ["\n", "\n\n\n", "  \t\r\n", "   "])
def test_blank_lines_are_no_rows(tmp_path, blank):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        f'{blank if blank.endswith(chr(10)) else ""}{{"prompt": "a", "answer": '
        f'"1"}}\n\n{{"prompt": "b"}}\n'
    )
    with pytest.raises(
        ValueError,
        match=rf"{path}:{3 + len(blank.splitlines()) * blank.endswith(chr(10))}: no answer",
    ):
        load_problems(str(path))  # the line that an editor shows
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": "b", "answer": "2"}}\n{blank}')
    assert [(problem.prompt, problem.index) for problem in load_problems(str(path))] == [
        ("a", 0),
        ("b", 1),
    ]


@pytest.mark.parametrize("spec", ["count=２", "difficulty=１", "seed=٣", "error_rate=０.５"])
def test_a_built_in_task_takes_the_digits_0_to_9(spec):
    with pytest.raises(ValueError, match="is not (int|float)"):
        load_problems(f"arithmetic:{spec}")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("cudnn", "needs an NVIDIA GPU with cuDNN, this is cpu; choose auto"),
        ("splash", "needs a TPU, this is cpu"),
    ],
)
def test_an_attention_kernel_that_is_not_here_is_named_before_anything_is_loaded(
    tmp_path, monkeypatch, kernel, words
):
    monkeypatch.setattr(Weights, "initial", lambda *_: pytest.fail("parameters were made"))
    config = demo.get_config("debug")
    config.run_dir, config.model.attention = str(tmp_path / "run"), kernel
    with pytest.raises(ValueError, match=f"^config.model.attention: got '{kernel}', which {words}"):
        Run.check(from_config_dict(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"lora_targets": "q_proj,c_attn"},
            "config.model.lora_targets: got 'c_attn', no linear layer has that name",
        ),
        ({"lora_rank": 33}, "config.model.lora_rank: got 33, k_proj is 96 x 32: at most 32"),
        (
            {"forward_precision": "fp8"},
            "config.model.forward_precision: got 'fp8', must be full with adapters",
        ),
        (
            {"adapter": "nowhere"},
            "config.model.adapter: [Errno 2] No such file or directory: "
            "'nowhere/adapter_config.json'",
        ),
        (
            {"adapter": "of rank 4", "lora_rank": 8},
            "config.model.lora_rank: got 8, the adapters of model.adapter have",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_named_before_anything_is_loaded(
    tmp_path, monkeypatch, changes, said
):
    monkeypatch.setattr(Weights, "initial", lambda *_: pytest.fail("parameters were made"))
    config = demo.get_config("debug")
    config.run_dir = str(tmp_path / "run")
    if changes.get("adapter") == "of rank 4":
        (model, _), lora = read_model(from_config_dict(config), None), Lora(4, 8.0)
        adapters = draw_params(adapter_declarations(model, lora), jax.random.key(0), "float32")
        adapter = Adapter(lora=lora, params=adapters, base_checksum=0, base_digest=0)
        save_adapter(adapter, model, tmp_path / "adapter", base_model="")
        changes = changes | {"adapter": str(tmp_path / "adapter")}
    config.model.update({"lora_rank": 4} | changes)
    with pytest.raises(ValueError) as caught:
        Run.check(from_config_dict(config))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_sizes_of_a_fresh_model_are_multiplied_before_anything_is_allocated(tmp_path, monkeypatch):
    # Three MLP matrices of 16,384 x 65,536 in each of three layers: 9.7e9 parameters, 36 GiB in
    # float32.
    monkeypatch.setattr(Weights, "initial", lambda *_: pytest.fail("parameters were made"))
    config = demo.get_config("debug")
    config.run_dir = str(tmp_path / "run")
    config.model.architecture.hidden_size = 16384
    config.model.architecture.intermediate_size = 65536
    config.mesh.data = config.mesh.fsdp = config.mesh.tensor = 1
    monkeypatch.setattr(
        placement, "training_mesh", lambda *_, num_params: make_mesh(devices=jax.devices()[:1])
    )
    with pytest.raises(
        ValueError, match="^memory: this machine has .* GiB and the phase 'step' takes at least"
    ):
        Run.check(from_config_dict(config))


@pytest.mark.parametrize(
    ("variables", "gpus", "plugin", "platform", "refused"),
    [
        ({}, ["0"], True, "cpu", True),
        ({}, ["0"], True, "gpu", False),
        ({}, [], True, "cpu", False),
        ({}, ["0"], False, "cpu", False),
        ({"JAX_PLATFORMS": "cpu"}, ["0"], True, "cpu", False),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["0"], True, "cpu", False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["0"], True, "cpu", True),
    ],
)
def test_a_gpu_that_jax_did_not_start_is_no_cpu_run(
    variables, gpus, plugin, platform, refused, monkeypatch
):
    """JAX logs why its plugin failed, and computes on the CPU: a run of a week in place of an
    hour.
    """
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(placement, "present_gpus", lambda: gpus)
    monkeypatch.setattr(placement, "has_cuda_plugin", lambda: plugin)
    if not refused:
        placement.check_platform(platform)
        return
    with pytest.raises(
        ValueError,
        match="^JAX: computes on the CPU, though .* JAX_PLATFORMS=cpu trains on the CPU$",
    ):
        placement.check_platform(platform)


def _check_kernel(config):
    settings = from_config_dict(config)
    placement.check_kernel(
        settings.model,
        "gpu",
        head_dim=64,
        segments_per_row=settings.training.segments_per_row,
    )


@pytest.mark.parametrize(
    ("setting", "dtype", "words"),
    [
        (
            "cudnn",
            "float32",
            "which computes in half precision alone; choose auto, or model.compute_dtype=bfloat16",
        ),
        # This machine has no cuDNN, whatever the platform is called.
        (
            "cudnn",
            "bfloat16",
            "'cudnn' is cuDNN's attention here, which does not work with 1 segment(s) a row "
            "(cuDNN is not detected.)",
        ),
        (
            "auto",
            "bfloat16",
            "'auto' is cuDNN's attention here, which does not work with 1 segment(s) a row (cuDNN "
            "is not detected.)",
        ),
    ],
)
def test_a_gpu_without_cudnn_is_told_what_to_choose(setting, dtype, words):
    config = demo.get_config()
    config.model.attention, config.model.compute_dtype = setting, dtype
    with pytest.raises(ValueError) as caught:
        _check_kernel(config)
    assert (
        words in str(caught.value)
        and "\n" not in str(caught.value)
        and len(str(caught.value)) < 400
    )


def test_a_cudnn_without_the_packed_layout_is_told_what_to_choose(monkeypatch):
    """A release of JAX that moved what is private: rows of one sequence still work."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda query, *_, **__: query)
    config = demo.get_config()
    config.model.attention, config.model.compute_dtype = "cudnn", "bfloat16"
    words = r"^config.model.attention: 'cudnn' is .* 16 segment\(s\) a row \(.*\); choose training.segments_per_row=1$"
    with pytest.raises(ValueError, match=words):
        _check_kernel(config)
    config.training.segments_per_row = 1
    _check_kernel(config)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nowhere.jsonl", "data nowhere.jsonl: no such file"),
        (
            "arithmetic:count=8,openai/gsm8k",
            r"'openai/gsm8k': .* pip install 'PATH_OF_A_CHECKOUT\[hub\]'",
        ),
    ],
)
def test_data_that_cannot_be_read_is_named_before_a_model_is_fetched(
    location, message, monkeypatch
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(run_task.hf_hub, "model_directory", lambda path: pytest.fail("fetched"))
    config = demo.get_config().to_dict()
    config["model"]["path"] = "pip:smollm2-135m-instruct"
    config["task"]["train"] = location
    with pytest.raises(ValueError, match=f"config.task.train: .*{message}"):
        Run.check(from_config_dict(config))

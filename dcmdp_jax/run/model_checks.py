"""Checks of a config against the model and the machine, before anything is allocated."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dcmdp_jax.config.engine import forward_scheme
from dcmdp_jax.config.settings import Config
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.attention import SKIP_SEGMENTS, choose_kernel, row_attention
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel.backend import has_cuda_plugin, present_gpus


def check_platform(platform: str) -> None:
    """Refuse the CPU where JAX should have found a GPU. JAX logs that its plugin failed and goes on without.

    Args:
        platform: platform of JAX's devices.
    """
    chosen = os.environ.get("JAX_PLATFORMS") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if platform == "cpu" and not chosen and present_gpus() and has_cuda_plugin():
        raise UserError(
            "JAX: computes on the CPU, though this machine has an NVIDIA GPU and JAX's plugin for it is installed; its "
            "log above says why the plugin failed. JAX_PLATFORMS=cpu trains on the CPU"
        )


def check_lengths(config: Config, model: ModelConfig) -> None:
    """Refuse lengths that the model has no room for, and more likeliest tokens than it has tokens."""
    if (top := config.rollout.top_logprobs) > model.vocab_size:
        raise UserError(
            f"config.rollout.top_logprobs: got {top}, must be at most {model.vocab_size}, the whole vocabulary"
        )
    if config.max_total_tokens > model.max_position_embeddings:
        raise UserError(
            f"config.rollout.max_completion_tokens: {config.rollout.max_completion_tokens} and task.max_prompt_tokens="
            f"{config.task.max_prompt_tokens} make {config.max_total_tokens}, the model has "
            f"max_position_embeddings={model.max_position_embeddings}"
        )


def check_experts(config: Config, model: ModelConfig) -> None:
    """Refuse settings of a mixture of experts for another model."""
    settings = config.algorithm.router_aux_loss, config.rollout.router_replay
    for name, value in zip(("algorithm.router_aux_loss", "rollout.router_replay"), settings, strict=True):
        if value and not model.num_experts:
            raise UserError(f"config.{name}: got {value}, the model is a {model.model_type}, which has no experts")


def forward_scheme_on(config: Config, engine: EngineArguments, platform: str) -> Scheme:
    """The engine's roundings that the forward pass repeats; another build of the engine is refused.

    Args:
        config: the settings.
        engine: with its model and platform.
        platform: platform of JAX's devices.
    """
    scheme = forward_scheme(config, platform, model=engine.model)
    if scheme != FULL and engine.platform and (engine.platform == "cpu") != (platform == "cpu"):
        name = "forward_precision" if config.model.forward_precision != "full" else "forward_cache"
        raise UserError(
            f"config.model.{name}: got {getattr(config.model, name)!r}; the engine computes on {engine.platform}, the "
            f"trainer on {platform}, and its build for {platform} rounds otherwise; set 'full'"
        )
    return scheme


def check_reductions(config: Config, mesh: Mesh) -> None:
    """Refuse bfloat16 on CPU devices that split the model.

    XLA's CPU compiler (jaxlib 0.10) aborts the process when it promotes the bfloat16 reductions of such a mesh.
    """
    split = {axis: mesh.shape[axis] for axis in ("fsdp", "tensor", "expert") if mesh.shape[axis] > 1}
    if split and config.model.compute_dtype == "bfloat16" and mesh.devices.flat[0].platform == "cpu":
        axes = ", ".join(f"mesh.{axis}={ways}" for axis, ways in split.items())
        raise UserError(
            f"config.model.compute_dtype: got 'bfloat16' with {axes} on CPU devices, where XLA can't add up bfloat16; "
            "choose float32, or split nothing but rows (mesh.data)"
        )


def check_kernel(config: Config, platform: str, head_dim: int) -> None:
    """Refuse an attention kernel that this machine can't run.

    Whether cuDNN is there, and takes this dtype, head width and number of segments, is found out by compiling the
    attention of two small rows: of one segment, as the embedded engine has them, and of a run's.
    """
    setting, dtype = config.model.attention, jnp.dtype(config.model.compute_dtype)
    if platform_kernel(config, platform) != "cudnn":
        return
    heads = jax.ShapeDtypeStruct((1, 128, 1, head_dim), dtype)
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
    install = "install nvidia-cudnn-cu12 (nvidia-cudnn-cu13 where JAX is for CUDA 13), or choose xla"
    segments = segments_of(config, "cudnn")
    for most, remedy in ((1, install), (segments, "choose training.segments_per_row=1")):
        how = {"kernel": "cudnn", "one_segment": most == 1, "segments": most, "ops": choose_ops(platform)}
        try:
            jax.jit(functools.partial(row_attention, **how)).lower(heads, heads, heads, ids).compile()
        except Exception as error:  # a missing library, an old one, a width it does not have: all raise differently
            reason = " ".join((str(error) or type(error).__name__).split())[:200]
            which = "" if most == 1 else f" with {most} segments a row"
            raise UserError(
                f"config.model.attention: {setting!r} is cuDNN's attention here, which does not work{which} "
                f"({reason}); {remedy}"
            ) from error


def segments_of(config: Config, kernel: str) -> int:
    """Segments of a row at most, for an attention kernel; 0 for any number."""
    return config.training.segments_per_row or SKIP_SEGMENTS.get(kernel, 1)


def platform_kernel(config: Config, platform: str) -> str:
    """The attention kernel on a platform.

    Raises:
        UserError: if the platform does not have the one of the settings, or it does not compute in their dtype.
    """
    dtype = jnp.dtype(config.model.compute_dtype)
    kernel = choose_kernel(config.model.attention, dtype, platform)
    if kernel == "splash" and platform != "tpu":
        raise UserError(f"config.model.attention: got 'splash', which needs a TPU, this is {platform}; choose auto")
    if kernel == "cudnn" and platform not in ("gpu", "cuda"):
        raise UserError(
            f"config.model.attention: got 'cudnn', which needs an NVIDIA GPU with cuDNN, this is {platform}; "
            "choose auto"
        )
    if kernel == "cudnn" and dtype == jnp.float32:
        raise UserError(
            "config.model.attention: got 'cudnn', which computes in half precision alone; choose auto, or "
            "model.compute_dtype=bfloat16"
        )
    return kernel

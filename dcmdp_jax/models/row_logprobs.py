"""Log-probs of packed rows by the training stack's forward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models import config, decoder, logprobs, moe, products, quantize
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.ops import choose_ops
from dcmdp_jax.models.params import quantized_leaves
from dcmdp_jax.models.scheme import FULL, Scheme
from dcmdp_jax.parallel import sharding
from dcmdp_jax.parallel.mesh import row_shards
from dcmdp_jax.types import TOP_IDS, Array, Params, Rows


class RowOutputs(NamedTuple):
    """Result of a forward pass on rows.

    Attributes:
        logprobs, entropy: [R, L] float32 nats, of the completion tokens.
        router: `moe.router_sums` of each layer over the positions that predict a completion token,
            stacked; empty of a dense model.
        top_logprobs: [R, L, k] float32 nats, of the ids of the column `top_ids`; None where the
            rows have none.
        kept_mass: [R, L] float32, S, the probability of these ids before the distribution was cut
            to them; or None.
    """

    logprobs: Array
    entropy: Array
    router: moe.Aux
    top_logprobs: Array | None = None
    kept_mass: Array | None = None


RowLogprobs = Callable[[Params, Rows], RowOutputs]
"""(params, rows [R, L]) -> `RowOutputs`."""

Probe = Callable[[Params, np.ndarray], Array]
"""(params, [rows, tokens] int32) -> [rows, tokens - 1] log-probs of each token after the first,
temperature 1.

May return a jax array that is still being computed: it is read after the engine has loaded the
weights.
"""


def make_row_logprobs(
    model: config.ModelConfig,
    compute: Compute,
    *,
    temperature: float,
    mesh: Mesh | None,
    scheme: Scheme = FULL,
    head_dtype: str = "compute",
    top_gradient: bool = False,
    cut: bool = False,
) -> RowLogprobs:
    """The training stack's forward pass on rows. Every log-prob of training comes from here.

    A mixture of experts uses the experts that the rows name, if they do (column `routed_experts`).

    Args:
        model: the model.
        compute: dtype, rematerialization, kernel and chunk.
        temperature: the one that completions are sampled at.
        mesh: the run's, or None for one device. The result is for `accumulate` and `map_rows` on
            this mesh.
        scheme: roundings of the engine that the forward pass repeats; gradients pass straight
            through.
        head_dtype: "compute", or "float32" for the product of the output layer.
        top_gradient: the gradient of `top_logprobs` flows too.
        cut: True cuts the distribution of rows with `top_ids` to these ids, like the engine's
            (top-p, top-k).
    """
    options = logprobs.LogprobOptions(
        temperature=temperature,
        chunk=compute.logprob_chunk,
        ops=choose_ops(decoder.platform_of(mesh)),
        listed_gradient=top_gradient or cut,
    )
    token_logprobs = functools.partial(logprobs.token_logprobs, options=options)
    pin: dict[str, Any] = {"mesh": mesh}
    if not sharding.data_parallel_only(mesh):
        pin["constrain"] = sharding.constrain(mesh)
        pin["look_up"], token_logprobs = _over_model_axes(options, model, compute, mesh)

    def row_logprobs(params: Params, rows: Rows) -> RowOutputs:
        with products.products_in(compute.dtype):
            output = decoder.output_kernel(params)
            if scheme.weights:
                output = quantize.straight_through(output, True, scheme.weights)
                layers = quantize.straight_through(
                    params["layers"], quantized_leaves(model)["layers"], scheme.weights
                )
                params = {**params, "layers": layers}

            counted = None
            if model.num_experts:
                counted = logprobs.predicting(rows.completion_mask)
            inputs = decoder.DecoderInputs(
                input_ids=rows.input_ids,
                position_ids=rows.position_ids,
                segment_ids=rows.segment_ids,
                counted=counted,
                replayed=rows.columns.get("routed_experts"),
            )
            hidden, router = decoder.hidden_states_and_aux(
                params,
                model,
                inputs,
                compute,
                scheme=scheme,
                **pin,
            )
            if head_dtype != "compute":
                hidden = hidden.astype(head_dtype)
            mask = rows.completion_mask
            listed = rows.columns.get(TOP_IDS)
            token, entropy, *listed_logprobs = token_logprobs(
                hidden, output, rows.input_ids, mask, listed
            )
            outputs = RowOutputs(logprobs=token, entropy=entropy, router=router)
            if listed is None:
                return outputs
            [top] = listed_logprobs
            if not cut:
                return outputs._replace(top_logprobs=top)

            # log S: log p_y - log S is the log-prob among the listed tokens.
            present = listed >= 0
            log_mass = jax.nn.logsumexp(top, axis=-1, where=present | ~mask[..., None])
            log_mass = jnp.where(mask, log_mass, 0.0)
            top = jnp.where(mask[..., None] & present, top - log_mass[..., None], 0.0)
            return outputs._replace(
                logprobs=token - log_mass, top_logprobs=top, kept_mass=jnp.exp(log_mass)
            )

    return row_logprobs


def without_replay(rows: Rows) -> Rows:
    """Rows for another policy than the one that sampled: experts are its router's choice."""
    columns = dict(rows.columns)
    columns.pop("routed_experts", None)
    return rows._replace(columns=columns)


def kernel_axes(model: config.ModelConfig, mesh: Mesh) -> logprobs.KernelAxes:
    """The mesh axes that split the output matrix; a size that its axis does not divide is whole."""

    def split(name: str, size: int) -> str | None:
        axis = sharding.PARAM_AXES[name]
        ways = mesh.shape[axis]
        if ways > 1 and size % ways == 0:
            return axis
        return None

    return logprobs.KernelAxes(
        embed=split("embed", model.hidden_size), vocab=split("vocab", model.vocab_size)
    )


def _over_model_axes(
    options: logprobs.LogprobOptions,
    model: config.ModelConfig,
    compute: Compute,
    mesh: Mesh,
) -> tuple[decoder.LookUp | None, Callable[..., Any]]:
    """The embedding's lookup and the output layer, rows split over fsdp and expert.

    The vocabulary is split over tensor. Each part of the output matrix is gathered once a pass and
    its gradient reduced once. Left to the compiler, both would happen in each chunk of tokens. No
    lookup where the embedding's width is whole.
    """
    axes = kernel_axes(model, mesh)
    rows = P(("fsdp", "expert"))
    look_up = None
    if axes.embed is not None:
        look_up = sharding.shard_map_over(
            sharding.MODEL_AXES,
            functools.partial(decoder.look_up_split, dtype=compute.dtype, axes=axes),
            mesh,
            in_specs=(P(axes.vocab, axes.embed), rows),
            out_specs=rows,
        )
    options = dataclasses.replace(options, kernel_axes=axes)
    token_logprobs = sharding.shard_map_over(
        sharding.MODEL_AXES,
        functools.partial(logprobs.token_logprobs, options=options),
        mesh,
        in_specs=(rows, P(axes.embed, axes.vocab), rows, rows, rows),
        out_specs=rows,
    )
    return look_up, token_logprobs


def make_probe(model: config.ModelConfig, compute: Compute, mesh: Mesh) -> Probe:
    """The training stack's own log-probs of a few short rows, as the step computes them."""
    row_logprobs = make_row_logprobs(model, compute, temperature=1.0, mesh=mesh)
    rows = P("data")
    mapped = sharding.shard_map_over_data(
        lambda *args: row_logprobs(*args)[0],
        mesh,
        in_specs=(P(), rows),
        out_specs=rows,
    )
    compiled = jax.jit(mapped, out_shardings=sharding.replicated(mesh))

    def probe(params: Params, ids: np.ndarray) -> Array:
        count, tokens = ids.shape
        shards = row_shards(mesh)
        multiple = 1
        if compute.attention == "splash":
            multiple = 128
        padding = ((0, -count % shards), (0, -tokens % multiple))
        input_ids = np.pad(ids.astype(np.int32), padding)
        real = np.pad(np.ones(ids.shape, bool), padding)
        position_ids = np.broadcast_to(np.arange(real.shape[1], dtype=np.int32), real.shape)
        rows = Rows(
            input_ids=input_ids,
            position_ids=position_ids,
            segment_ids=real.astype(np.int32),
            completion_mask=real & (position_ids > 0),
            completion_index=np.zeros_like(input_ids),
            columns={},
        )
        return compiled(params, rows)[:count, 1:tokens]

    return probe

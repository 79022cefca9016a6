"""The embedded engine with Qwen3.5's recurrent layers and experts.

Routed experts, and one that all tokens pass through.
"""

import jax
import numpy as np
import pytest

from dcmdp_jax.data.packing import pack
from dcmdp_jax.data.row_layout import make_row_shapes
from dcmdp_jax.engines.protocol import SamplingParams, check_routed_experts
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_config import from_hf
from dcmdp_jax.models.moe import router_metrics
from dcmdp_jax.models.params import init_params, quantized_leaves
from dcmdp_jax.models.quantize import in_float32, stored
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.mesh import make_mesh
from tests.models.gated_delta_test import EXPERTS
from tests.support.sampling import local_engine, sample

CONFIG = from_hf(
    EXPERTS | {"vocab_size": 40, "initializer_range": 0.2, "tie_word_embeddings": False}
)
SAMPLING = SamplingParams(
    group_size=3, max_completion_tokens=9, temperature=0.8, stop_token_ids=(3, 4)
)
PROMPTS = [
    np.random.default_rng(0).integers(0, 40, length).astype(np.int32) for length in (1, 5, 16)
]


@pytest.mark.parametrize(("precision", "ways"), [("float32", 1), ("float32", 2), ("int8", 1)])
def test_the_engine_is_the_training_stack_that_replays_its_experts(precision, ways):
    """On one device and with experts on two the log-probs are the training stack's.

    int8 as the training stack on weights rounded here, each expert's columns and the shared one's
    apart. Its gate and the router stay in full precision.
    """
    params = init_params(CONFIG, jax.random.key(0))
    chosen = quantized_leaves(CONFIG)
    mesh = make_mesh(1, 1, 1, ways, devices=jax.devices()[:ways])
    rows = dict(max_rows=4, min_rows=2, cache_block=4)
    local = local_engine(
        CONFIG, precision=precision, mesh=mesh, routed_experts=True, max_total_tokens=32, **rows
    )
    local.sync_weights(params, 0)
    rollout = sample(local, PROMPTS, SAMPLING, seed=1, step=2)
    check_routed_experts(rollout.episodes, *CONFIG.routing)
    mlp = chosen["layers"]["full"]["mlp"]
    assert (
        mlp["shared_expert"]["up"]["kernel"]
        and not mlp["shared_gate"]["kernel"]
        and not mlp["router"]["kernel"]
    )
    coarse = params
    if precision == "int8":
        coarse = jax.tree.map(
            lambda leaf, yes: in_float32(stored(leaf, "int8")) if yes else leaf, params, chosen
        )
        coarse["output"] = in_float32(stored(params["output"], "int8"))
    count = len(rollout.episodes)
    total = 32
    plan = make_row_shapes(
        row_lengths=(total,),
        micro_batch_tokens=total * count,
        mini_batches=1,
        completions=count,
        segments_per_row=1,
        row_shards=1,
    )
    batch, _ = pack(rollout.episodes, np.zeros(count, np.float32), plan, mask_truncated=False)
    packed = jax.tree.map(lambda x: x[0, 0], batch.rows[0])
    score = jax.jit(make_row_logprobs(CONFIG, Compute(), temperature=0.8, mesh=None))
    found = score(coarse, packed)
    whole = score(params, packed)
    mask = packed.completion_mask
    assert np.std(packed.rollout_logprobs[mask]) > 0.5
    # 5e-5 measured: at these weights a change of 1e-7 of each moves a log-prob by 1e-4.
    np.testing.assert_allclose(packed.rollout_logprobs[mask], found.logprobs[mask], atol=3e-4)
    # One layer's experts in place of another's, or of the last layer of each period alone, would
    # not agree.
    assert (
        found.router["router_load"].shape == (4, 6)
        and router_metrics(found.router)["moe/routing_agreement"] == 1
    )
    assert (
        precision == "float32"
        or np.abs(packed.rollout_logprobs - whole.logprobs)[mask].max() > 1e-3
    )

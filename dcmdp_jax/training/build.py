"""The parts of a checked run: the engine, the rewards, the checkpoints, the compiled step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dcmdp_jax.engines.protocol import Engine
from dcmdp_jax.engines.registry import ENGINES, EngineArguments
from dcmdp_jax.engines.sidecar.probe import Probe
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.params import init_params, logical_axes, param_shapes
from dcmdp_jax.parallel.mesh import row_shards, sampling_mesh
from dcmdp_jax.parallel.sharding import param_shardings, replicated, shard_map_over_data
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.scoring import RewardScorer
from dcmdp_jax.training.checkpoint import Checkpoints
from dcmdp_jax.training.programs import make_step_programs
from dcmdp_jax.training.row_logprobs import make_row_logprobs
from dcmdp_jax.training.setup import Plan
from dcmdp_jax.training.state import batch_shardings
from dcmdp_jax.types import Batch, DualState, LossScale, Params, Rows, TrainState


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts that the training loop works with.

    Attributes:
        engine: samples; has no weights yet.
        verifier: judges answers, for the reward `math` and for evaluation.
        scorer: computes rewards.
        checkpoints: of the run directory.
        optimizer, dual, loss_scale: what a fresh state is made with.
        shardings, batch_shardings: of the state and of a batch.
        train_step: (state, batch, reference parameters) -> (state, metrics), compiled at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the sampler's; else None.
    """

    engine: Engine
    verifier: Verifier
    scorer: RewardScorer
    checkpoints: Checkpoints
    optimizer: optax.GradientTransformation
    dual: DualState
    loss_scale: LossScale | None
    shardings: TrainState
    batch_shardings: Batch
    train_step: Callable
    rescore: Callable | None


def build_parts(plan: Plan, stack: contextlib.ExitStack) -> Parts:
    """Make the parts of a run. Starts the engine; compiles and loads nothing.

    Args:
        plan: the checked run.
        stack: closes engine, verifier, reward functions and checkpoints.

    Raises:
        EngineError, MemoryError: in one line, if the engine does not start.
    """
    config = plan.config
    engine = make_engine(plan)
    stack.callback(engine.close)
    verifier = stack.enter_context(
        Verifier(config.task.verifier_workers, config.task.verifier_timeout, config.task.verifier_budget)
    )
    scorer = RewardScorer(
        plan.rewards,
        verifier,
        plan.columns,
        by_source=len({problem.source for problem in plan.train.problems}) > 1,
        timeout_s=config.rewards.timeout,
        memory_gib=config.rewards.memory_limit,
        stop_on_error=config.rewards.on_error == "error",
    )
    stack.callback(scorer.close)
    checkpoints = Checkpoints(
        config.run_dir,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        hosts=plan.hosts,
    )
    stack.callback(checkpoints.close)
    programs = make_step_programs(config, plan.model, plan.compute, plan.mesh)
    return Parts(
        engine=engine,
        verifier=verifier,
        scorer=scorer,
        checkpoints=checkpoints,
        optimizer=programs.optimizer,
        dual=programs.dual,
        loss_scale=programs.loss_scale,
        shardings=programs.shardings,
        batch_shardings=batch_shardings(plan.mesh, buckets=len(plan.packing.row_lengths)),
        train_step=programs.train_step,
        rescore=programs.rescore,
    )


def make_engine(plan: Plan) -> Engine:
    """The inference engine of `rollout.engine`, ready for weights.

    Raises:
        EngineError, MemoryError: in one line, if it does not start.
    """
    config, rollout = plan.config, plan.config.rollout
    arguments = EngineArguments(
        model=plan.model,
        precision=rollout.precision,
        compute_dtype=rollout.compute_dtype,
        kv_cache_dtype=rollout.kv_cache_dtype,
        max_total_tokens=config.max_total_tokens,
        max_rows=plan.memory.rows or rollout.max_rows,
        min_rows=rollout.min_rows,
        mesh=lambda: sampling_mesh(plan.mesh, tensor=rollout.local.tensor, expert=rollout.local.expert),
        probe=lambda: make_probe(plan.model, plan.compute, plan.mesh),
        vllm=rollout.vllm,
        directory=Path(config.run_dir) / (f"vllm_{plan.hosts.index}" if plan.hosts.index else "vllm"),
        routed_experts=rollout.router_replay,
    )
    return ENGINES[rollout.engine](arguments)


def initial_params(plan: Plan) -> Params:
    """The starting parameters on the mesh: from `model.path`, or fresh from the seed."""
    settings = plan.config.model
    shapes = param_shapes(plan.model, settings.param_dtype)
    shardings = param_shardings(logical_axes(plan.model), shapes, plan.mesh)
    if settings.path:
        return hf_weights.load_params(settings.path, plan.model, dtype=settings.param_dtype, shardings=shardings)
    key = jax.random.key(plan.config.training.seed)
    return jax.jit(lambda: init_params(plan.model, key, settings.param_dtype), out_shardings=shardings)()


def make_probe(model: ModelConfig, compute: Compute, mesh: Mesh) -> Probe:
    """The training stack's own log-probs of a few short rows, as the step computes them."""
    row_logprobs = make_row_logprobs(model, compute, temperature=1.0, mesh=mesh)
    rows = P("data")
    mapped = shard_map_over_data(lambda *args: row_logprobs(*args)[0], mesh, in_specs=(P(), rows), out_specs=rows)
    compiled = jax.jit(mapped, out_shardings=replicated(mesh))

    def probe(params: Params, ids: np.ndarray) -> jax.Array:
        count, tokens = ids.shape
        shards, multiple = row_shards(mesh), 128 if compute.attention == "splash" else 1
        padded = np.zeros((-(-count // shards) * shards, -(-tokens // multiple) * multiple), np.int32)
        padded[:count, :tokens] = ids
        places = np.broadcast_to(np.arange(padded.shape[1], dtype=np.int32), padded.shape)
        real = np.zeros(padded.shape, bool)
        real[:count, :tokens] = True
        rows = Rows(
            input_ids=padded,
            position_ids=places,
            segment_ids=real.astype(np.int32),
            completion_mask=real & (places > 0),
            completion_index=np.zeros_like(padded),
            rollout_logprobs=np.zeros(padded.shape, np.float32),
        )
        return compiled(params, rows)[:count, 1:tokens]

    return probe

"""The compiled programs of a step, made from a run's parts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data import episode, packing
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.lora import make_merge, make_policy, trained
from dcmdp_jax.models.params import declared_shapes, quantized_leaves
from dcmdp_jax.models.quantize import arrival, watched_columns
from dcmdp_jax.models.row_logprobs import make_row_logprobs
from dcmdp_jax.parallel.backend import compile_beside
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.parallel.sharding import batch_shardings, sharded
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.training import objective
from dcmdp_jax.training.optimizer import initial_loss_scale, make_optimizer, make_schedule
from dcmdp_jax.training.rescore import OLD_LOGPROBS, make_old_logprobs, make_rescore
from dcmdp_jax.training.state import initial_dual, new_state, train_state_shardings
from dcmdp_jax.training.step import StepSetup, jit_step, train_step
from dcmdp_jax.types import Array, Batch, DualState, Params, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncPrograms:
    """What a weight sync needs: the parameters for the engine, and how much of an update arrives.

    Attributes:
        merged: (trained, frozen parameters) -> those for an engine, and metrics of the merge; see
            `lora`. `Adapted` for an engine that takes adapters.
        watched: (trained parameters) -> the columns to compare; none of adapters, which `merged`
            measures.
        arrival: (watched, trained parameters) -> metrics, how much of an update is left after the
            engine's rounding.
    """

    merged: Callable[[Params, Params | None], tuple[Params, objective.Metrics]]
    watched: Callable[[Params], list[Array]]
    arrival: Callable[[list[Array], Params], objective.Metrics]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """A training step and what it starts from.

    Attributes:
        create: (parameters, dual state) -> a fresh state.
        arguments: state, batch and frozen parameters of the step: shapes, dtypes and shardings.
        shardings: shardings of the state.
        train_step: see `step.train_step`; compiled by `compile_ahead`, else at its first call.
        rescore: with rollout.precision=exact, puts the training stack's log-probs in place of the
            sampler's; else None.
        old_logprobs: adds log-probs under given weights: with rollout.lag those that sampled, in
            `dcmdp sft` the present ones, for the held-out loss. Else None.
        setup: what the step is made of.
        sync: what a weight sync needs.
    """

    create: Callable[[Params, DualState], TrainState]
    arguments: tuple[TrainState, Batch, Params | None]
    shardings: TrainState
    train_step: Callable
    rescore: Callable | None
    old_logprobs: Callable | None
    setup: StepSetup
    sync: SyncPrograms

    def compile_ahead(self, hosts: Hosts) -> Callable[[], None]:
        """Compile the step and the passes before it, while weights are read and the engine samples.

        JAX keeps the programs.

        Args:
            hosts: the processes that run them.

        Returns:
            Collective: a function that returns when every process has compiled them. A process that
            had not would compile in its main thread, where it waits for the others, see
            `SeveralHosts.starting_programs_together`.
        """
        state, batch, frozen = self.arguments
        # The batch as it is before `old_logprobs` adds its columns.
        added = OLD_LOGPROBS, episode.OLD_TOP_LOGPROBS
        buckets = []
        for rows in batch.rows:
            columns = {name: x for name, x in rows.columns.items() if name not in added}
            buckets.append(rows._replace(columns=columns))
        sampled = batch._replace(rows=tuple(buckets))

        def compile_later(name: str, program: Any, *arguments: Any) -> Callable[[], None]:
            return compile_beside(lambda: program.lower(*arguments).compile(), name)

        waits = [compile_later("the step", self.train_step, state, batch, frozen)]
        for program in (self.rescore, self.old_logprobs):
            if program is not None:
                params = self.setup.policy(state.params, frozen)
                waits.append(compile_later(program.__name__, program, params, sampled))

        @functools.cache
        def wait_until_compiled() -> None:
            for wait in waits:
                wait()
            hosts.wait_for_all()

        return wait_until_compiled


def make_step_programs(
    config: Config,
    model: ModelConfig,
    placement: Placement,
    lora: Lora | None = None,
) -> StepPrograms:
    """Make the programs of a step. Nothing but scalars is compiled or allocated.

    Args:
        config: the settings.
        model: the model.
        placement: devices, computation and shapes of a batch.
        lora: shape of the adapters; None trains all parameters.
    """
    mesh = placement.mesh
    compute = placement.compute
    rollout = config.rollout
    exact = rollout.precision == "exact"
    schedule = make_schedule(config.optimizer, updates=config.training.steps * config.mini_batches)
    optimizer = make_optimizer(config.optimizer, schedule)
    row_logprobs = make_row_logprobs(
        model,
        compute,
        temperature=rollout.temperature,
        mesh=mesh,
        scheme=placement.scheme,
        head_dtype=config.model.head_dtype,
        top_gradient=config.algorithm.differentiates_head,
        cut=rollout.cuts,
    )
    setup = StepSetup(
        row_logprobs=row_logprobs,
        compute_dtype=compute.dtype,
        settings=config.algorithm,
        max_completion_tokens=rollout.max_completion_tokens,
        optimizer=optimizer,
        schedule=schedule,
        mesh=mesh,
        always_recompute=exact,
        record_tokens=config.observe.rollouts_every_steps > 0,
        policy=make_policy(lora),
        token_rewards=objective.distillation(*config.teacher),
    )

    loss_scale = initial_loss_scale(compute.dtype)

    def fresh(params: Params, dual: DualState) -> TrainState:
        return new_state(params, optimizer, dual, loss_scale)

    shapes = declared_shapes(trained(model, lora), config.model.param_dtype)
    state = jax.eval_shape(fresh, shapes, initial_dual(config.algorithm))
    shardings = train_state_shardings(state, model, mesh, lora)
    batch = packing.abstract_batch(placement.packing, placement.columns)

    rescore = None
    if exact:
        rescore = make_rescore(row_logprobs, mesh=mesh)
    old_logprobs = None
    if rollout.lag:
        old_logprobs = make_old_logprobs(row_logprobs, mesh=mesh)
    return StepPrograms(
        create=jax.jit(fresh, out_shardings=shardings),
        arguments=(
            sharded(state, shardings),
            sharded(batch, batch_shardings(mesh)),
            placement.frozen,
        ),
        shardings=shardings,
        train_step=jit_step(train_step, setup, shardings),
        rescore=rescore,
        old_logprobs=old_logprobs,
        setup=setup,
        sync=sync_programs(rollout, model, placement, lora),
    )


def sync_programs(
    rollout: RolloutSettings, model: ModelConfig, placement: Placement, lora: Lora | None
) -> SyncPrograms:
    """The programs of a weight sync, by the settings."""
    if lora is not None:
        apart = placement.engine.arguments.lora is not None
        return SyncPrograms(
            merged=make_merge(lora, rollout.precision, apart=apart),
            watched=lambda _: [],
            arrival=lambda *_: {},
        )
    quantized = quantized_leaves(model)
    return SyncPrograms(
        merged=lambda params, _: (params, {}),
        watched=jax.jit(functools.partial(watched_columns, quantized=quantized)),
        arrival=jax.jit(
            functools.partial(arrival, quantized=quantized, precision=rollout.precision)
        ),
    )

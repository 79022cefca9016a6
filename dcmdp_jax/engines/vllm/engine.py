"""The trainer's side of vLLM: the `Engine` protocol over one sidecar, or over several."""

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.activity import activity
from dcmdp_jax.data.episode import Episode
from dcmdp_jax.engines import vllm_common
from dcmdp_jax.engines.engine_kind import EngineArguments, check_temperature
from dcmdp_jax.engines.protocol import (
    EngineError,
    SamplingParams,
    TokenRows,
    check_finite,
    checked_sequences,
    scored_rows,
)
from dcmdp_jax.engines.sidecar import segments, weights, wire
from dcmdp_jax.engines.sidecar.process import EngineProcess, Launch, Sidecar
from dcmdp_jax.engines.sidecar.replica import Replica
from dcmdp_jax.engines.sidecar.supervisor import Calls, Fleet, Member, Supervisor
from dcmdp_jax.engines.vllm import devices, launch
from dcmdp_jax.models.lora import Adapted
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("sidecar.py")


class VllmEngine:
    """The `Engine` protocol with stock vLLM in `rollout.vllm.replicas` processes of its own.

    Sampling is a function of (seed, step, row): each completion is a request with its own seed
    (`vllm_common.request_seeds`). Log-probs depend on batch composition too, by rounding. So the
    same prompts go to the same replica each time, the prefix cache is emptied before each call, and
    an interrupted replica samples its whole part of the call again: the same call gives the same
    bits, whichever sidecar was restarted during it.

    All replicas load from one copy of the weights. A sidecar that fails is restarted alone
    (`replica.Replica`), while the others go on.

    For one thread.
    """

    def __init__(self, arguments: EngineArguments) -> None:
        """Start vLLM and wait until it is ready; with `prepare`, at its first use.

        That takes seconds on CPU, a minute on a GPU.

        Args:
            arguments: `directory` gets config.json, log, temporary files; with several replicas
                each has its log in a directory of its own in there, named by its number. `max_rows`
                counts all replicas together; more wait in vLLM's queues. Without a `platform` the
                machine and the model are checked here.

        Raises:
            UserError: see `VllmKind.check_machine` and `check`; before anything is started.
            MemoryError: if shared memory for the copies of the weights can't be allocated; it says
                how much is free.
            EngineError: if vLLM does not start.
        """
        if not arguments.platform:
            arguments = dataclasses.replace(arguments, platform=launch.check_machine(arguments))
            launch.check_planned(arguments)
        settings = arguments.settings
        platform = arguments.platform

        self.cache_rounding = vllm_common.cache_rounding(arguments.kv_cache_dtype, platform)
        self.config = arguments.model
        self.max_total_tokens = arguments.max_total_tokens
        if platform == "cpu" and settings.sleep:
            logger.warning("sleep=%d: vLLM's CPU build frees nothing by it", settings.sleep)

        self._by_ray = settings.placement == "ray"
        put = None
        if self._by_ray:
            cluster, _, _ = launch.ray_modules()
            put = cluster.ray.put
            # Ray chooses the devices.
            replica_devices = [""] * settings.known_replicas
        else:
            replica_devices = devices.devices_of_replicas(settings, platform)
        settings = dataclasses.replace(settings, replicas=len(replica_devices))
        arguments = dataclasses.replace(
            arguments,
            directory=arguments.directory.resolve(),
            settings=settings,
        )

        self.weights = weights.SharedWeights(arguments, put)
        self.replicas: list[Replica] = []
        self._calls = Calls([])
        self._starting = None
        self._open = contextlib.ExitStack()
        try:
            launch.write_model_config(arguments)
            start_fields = {
                "protocol": wire.PROTOCOL,
                "engine": launch.engine_arguments(arguments, available=self.weights.left_bytes),
                "manifest": segments.wire_manifest(self.weights.bridge.manifest),
                "segments": [segment.descriptor for segment in self.weights.segments],
                "segment_bytes": self.weights.bridge.num_bytes,
            }
            if self._by_ray:
                supervise = self._supervise_actors(arguments, start_fields)
            else:

                def supervise(replica_launch: Launch) -> Supervisor:
                    start = functools.partial(Sidecar, replica_launch, start_fields)
                    return Supervisor(replica_launch.name, start)

            for replica_launch in self._launches(arguments, replica_devices):
                replica_launch.directory.mkdir(exist_ok=True)
                replica = Replica(
                    supervisor=supervise(replica_launch),
                    weights=self.weights,
                    probe_tolerance=launch.probe_tolerance(arguments),
                    request_seeds=vllm_common.request_seeds,
                    sleep_level=settings.sleep,
                    routed_experts=arguments.routed_experts,
                    top_logprobs=arguments.top_logprobs,
                )
                self.replicas.append(replica)

            starting = self._begin([replica.supervisor.start for replica in self.replicas])
            if arguments.prepare and devices.may_start_beside_trainer(platform):
                self._starting = starting
            else:
                starting.results()
        except BaseException:
            self.close()
            raise

    def _launches(
        self,
        arguments: EngineArguments,
        replica_devices: Sequence[str],
    ) -> Iterator[Launch]:
        """Yield the launch of each replica; `replica_devices` are the devices that it sees."""
        settings = arguments.settings
        python = settings.python
        if not self._by_ray:
            python = launch.interpreter(python)
        for number, device_names in enumerate(replica_devices):
            name = "vLLM"
            directory = arguments.directory
            if settings.replicas > 1:
                name = f"vLLM replica {number}"
                directory = arguments.directory / str(number)
            yield Launch(
                name=name,
                python=python,
                script=SCRIPT,
                directory=directory,
                environment=launch.environment(arguments, device_names),
                start_timeout_s=settings.start_timeout_s,
                temporary_variables=("VLLM_RPC_BASE_PATH",),
            )

    def _supervise_actors(
        self, arguments: EngineArguments, start_fields: wire.Fields
    ) -> Callable[[Launch], Supervisor]:
        """Connect to the Ray cluster, or start one.

        Returns:
            A function that makes the supervisor of an actor, not started yet.
        """
        settings = arguments.settings
        resource, amount = launch.resource(settings, arguments.platform)
        cluster, ray_actors, actor = launch.ray_modules()
        # With room for what is not weights.
        store_bytes = 2 * self.weights.bridge.num_bytes + (80 << 20)
        resources = {}
        if resource != "GPU":
            resources[resource] = amount * settings.replicas
        cluster.connect(
            settings.address,
            resources=resources,
            object_store_memory=store_bytes,
        )
        self._open.callback(cluster.disconnect)
        ray_actors.check_room(settings.replicas, resource, amount, store_bytes)

        config = (arguments.directory / "config.json").read_text(encoding="utf-8")
        # The weights come with each sync.
        actor_fields = start_fields | {"segments": [], "config": config}
        fleet = Fleet(settings.min_replicas, settings.start_timeout_s, ray_actors.check_head)

        def supervise(replica_launch: Launch) -> Supervisor:
            options = ray_actors.interpreter(replica_launch.python, **replica_launch.environment)
            if resource == "GPU":
                options["num_gpus"] = amount
            else:
                options["resources"] = {resource: amount}

            def start(_: threading.Event) -> EngineProcess:
                return ray_actors.ActorProcess(
                    name=replica_launch.name,
                    actor=actor.VllmActor,
                    options=options,
                    start=actor_fields,
                    # The run's report reads it.
                    places=replica_launch.directory / "nodes.txt",
                )

            return Member(replica_launch.name, start, fleet)

        return supervise

    def _begin(self, calls: Sequence[Callable[[Calls], Any]]) -> Calls:
        """Begin new calls of the replicas, once these are ready; ends calls that were left open."""
        self.check_start(wait=True)
        self._calls.stop()
        self._calls = Calls(calls)
        return self._calls

    def check_start(self, *, wait: bool = False) -> None:
        """Raise the error of a start beside the trainer if it has failed, or wait for its end."""
        if self._starting is not None and (wait or self._starting.failed):
            starting = self._starting
            self._starting = None
            with activity("waiting for vLLM to start"):
                starting.results()

    def sync_weights(self, params: Params | Adapted, policy_version: int) -> dict[str, float]:
        """Publish the parameters and have each replica load them; return when they are in use.

        With `EngineArguments.lora` they are `Adapted`: a sidecar that has the base gets A and B
        alone.

        Each load is proven: the sidecar's checksum of each tensor as the model took it is the
        trainer's, the prefix cache was emptied, and the engine's log-probs of fixed sequences are
        near the trainer's own. A sidecar that fails this is never used half-updated: it is started
        again and gets the weights again.

        Returns:
            "mismatch/probe": mean |log p_train - log p_engine| over the probe, nats; of the replica
                with the largest.
            "replica/{number}/{name}": with Ray, the replica's work since the last call.

        Raises:
            ValueError: for parameters that do not fit the model.
            EngineError: if it fails again and again, or if the trainer's own log-probs are not
                finite.
        """
        publication = self.weights.publish(params, policy_version)
        loads = [
            functools.partial(replica.load, publication=publication) for replica in self.replicas
        ]
        results = self._begin(loads).results()

        metrics = {}
        if publication.probe is not None:
            differences = [difference for difference in results if difference is not None]
            metrics["mismatch/probe"] = max(differences)
        # A run's report names the nodes of Ray's actors, with the work that each has done.
        if self._by_ray:
            for number, replica in enumerate(self.replicas):
                for name, value in replica.supervisor.take_work().items():
                    metrics[f"replica/{number}/{name}"] = value
        return metrics

    def _published(self, before: str) -> weights.Publication:
        if self.weights.published is None:
            raise EngineError(f"no weights: sync_weights must come before {before}")
        return self.weights.published

    def generate(
        self,
        prompts: TokenRows,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """See `Engine.generate`; prompt `p` is sampled by replica `p` mod their number.

        A sidecar that breaks on the way is started again and samples its prompts again, which gives
        the same bits; what was yielded is not yielded again. An empty list comes every half second.
        """
        publication = self._published("generate")
        check_temperature("vllm", sampling.temperature, vllm_common.VLLM_TEMPERATURES)
        prompts = checked_sequences(self, prompts, "prompt", reserve=sampling.max_completion_tokens)
        numbered_prompts = list(enumerate(prompts))
        samples = []
        for first, replica in enumerate(self.replicas[: len(prompts)]):
            sample = replica.sample(
                publication,
                dict(numbered_prompts[first :: len(self.replicas)]),
                sampling,
                seed=seed,
                step=step,
                first_prompt=first_prompt,
            )
            samples.append(sample)

        def groups() -> Iterator[list[Episode]]:
            calls = self._begin(samples)
            with contextlib.closing(calls.values()) as values:
                for complete in values:
                    yield complete or []
                    if calls.stopped.is_set():
                        raise EngineError("generate: ended by a later request to the process")

        return groups()

    def score(
        self,
        prompts: TokenRows,
        completions: TokenRows,
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """See `Engine.score`; each row in one pass as a prompt."""
        publication = self._published("score")
        prompts, rows = scored_rows(self, prompts, completions, temperature)
        starts = [prompt.size for prompt in prompts]
        num_replicas = len(self.replicas)
        scores = []
        for first, replica in enumerate(self.replicas[: len(rows)]):
            score = functools.partial(
                replica.score,
                publication=publication,
                rows=rows[first::num_replicas],
                starts=starts[first::num_replicas],
                temperature=temperature or 1.0,
            )
            scores.append(score)
        by_replica = self._begin(scores).results()
        logprobs = [by_replica[row % num_replicas][row // num_replicas] for row in range(len(rows))]
        check_finite(logprobs)
        return logprobs

    def observe(
        self, rows: TokenRows, modules: Sequence[str]
    ) -> dict[str, tuple[np.ndarray | None, np.ndarray]]:
        """Inputs and outputs of modules of vLLM's network, by forward hooks; each row in one pass.

        Args:
            rows: token ids.
            modules: names in vLLM's network, "model.layers.0.mlp".

        Returns:
            Name -> what it read, None where that is token ids, and what it gave, [tokens, width]
            float32 each, the tokens of all rows one after the other.

        Raises:
            EngineError: if a module was not called, which compiled or captured networks do not, or
                the engine breaks.
        """
        publication = self._published("observe")
        rows = checked_sequences(self, rows, "row")
        observe = functools.partial(
            self.replicas[0].observe,
            publication=publication,
            rows=rows,
            modules=modules,
        )
        [arrays] = self._begin([observe]).results()

        num_tokens = sum(row.size for row in rows)
        observed = {}
        for name in modules:
            output = arrays.get(f"{name} gave", np.empty(0))
            if output.ndim != 2 or len(output) != num_tokens:
                raise EngineError(
                    f"observe: {name} gave shape {output.shape} for {num_tokens} tokens"
                )
            observed[name] = arrays.get(f"{name} read"), output
        return observed

    def release_weights(self) -> None:
        """Do nothing: `rollout.vllm.sleep` frees a sidecar's own memory between calls."""

    def close(self) -> None:
        """Stop the sidecars and free the shared memory. Safe to call twice."""
        self._calls.stop()
        for replica in self.replicas:
            replica.supervisor.close()
        self.weights.close()
        self._open.close()

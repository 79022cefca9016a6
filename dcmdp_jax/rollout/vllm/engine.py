"""The trainer's side of vLLM: the `Engine` protocol over a sidecar."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dcmdp_jax.config import VllmSettings
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.params import check_params
from dcmdp_jax.rollout.engine import EngineError, SamplingParams
from dcmdp_jax.rollout.episode import Episode, OpenGroups, single_turn
from dcmdp_jax.rollout.sidecar.bridge import WeightBridge
from dcmdp_jax.rollout.sidecar.manifest import differing
from dcmdp_jax.rollout.sidecar.probe import Probe, probe_ids
from dcmdp_jax.rollout.sidecar.process import Launch, Sidecar, SidecarBroken, Supervisor
from dcmdp_jax.rollout.sidecar.shared_memory import Segment, available_bytes
from dcmdp_jax.rollout.validation import check_finite, checked_sequences, scored_rows
from dcmdp_jax.rollout.vllm import launch
from dcmdp_jax.rollout.vllm.replies import checked_completions
from dcmdp_jax.rollout.vllm.seeds import request_seeds
from dcmdp_jax.types import Array, Params

logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("sidecar.py")


@dataclasses.dataclass(frozen=True)
class _Publication:
    """Weights that lie in a segment.

    Attributes:
        serial: counts publications; its parity says which of the two.
        policy_version: the trainer's step.
        checksums: of what was sent, [tensors] uint64.
        probe: the trainer's own log-probs of the probe sequences, or None without a probe.
    """

    serial: int
    policy_version: int
    checksums: np.ndarray
    probe: Array | None


class VllmEngine:
    """Keeps the `Engine` protocol with stock vLLM in a process of its own.

    Sampling is a function of (seed, step, row): each completion is a request with its own seed (`seeds.request_seeds`).
    Log-probs depend on batch composition too, by rounding, so a call that is interrupted is sampled again whole: the
    prefix cache is emptied before each call, and the same call gives the same bits.

    A sidecar that dies, hangs or answers nonsense is started again, gets the weights again out of shared memory, and
    is asked again; log-probs that are not finite are asked for once more of a new one before they are believed.

    For one thread, but for `publish_weights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: VllmSettings,
        *,
        directory: Path,
        precision: str,
        compute_dtype: str,
        kv_cache_dtype: str = "auto",
        max_total_tokens: int,
        max_rows: int,
        probe: Probe | None,
        script: Path = SCRIPT,
    ) -> None:
        """Checks everything, then starts vLLM and waits until it is ready (seconds on CPU, a minute on a GPU).

        Args:
            config: the model.
            settings: of the sidecar.
            directory: of the sidecar: config.json, log, temporary files. Made if it is not there.
            precision: of the weights: "float32", "float16", "bfloat16", "int8", "fp8_per_block".
            compute_dtype: vLLM's dtype.
            kv_cache_dtype: "auto", "fp8" (e4m3), "fp8_e5m2".
            max_total_tokens: longest prompt with its completion.
            max_rows: completions in flight; more wait in vLLM's queue.
            probe: the trainer's own log-probs, which the engine's must resemble after each push; None: no probe.
            script: the sidecar.

        Raises:
            ValueError: for a setting, an interpreter, a vLLM version that can't be; before anything is started.
            MemoryError: if shared memory for two copies of the weights can't be allocated; it says how much is free.
            EngineError: if vLLM does not start.
        """
        cpu = launch.check_installation(settings, precision)
        launch.check_model(config)
        self.config = config
        self.precision = precision
        self.max_total_tokens = max_total_tokens
        self._bridge = WeightBridge(config, dtype=compute_dtype, int8=precision == "int8")
        size = self._bridge.num_bytes
        if 2 * size > (available := available_bytes()):
            raise MemoryError(
                f"vLLM sidecar: two copies of the weights in shared memory need {2 * size / 2**30:.2f} GiB, "
                f"{available / 2**30:.2f} GiB are free; free some, or choose a smaller model or rollout.compute_dtype"
            )
        directory = directory.resolve()
        launch.write_model_config(
            config, directory, precision=precision, compute_dtype=compute_dtype, max_total_tokens=max_total_tokens
        )
        how_to_start = Launch(
            name="vLLM",
            python=launch.interpreter(settings.python),
            script=script,
            directory=directory,
            engine=launch.engine_arguments(
                config, settings, directory, precision=precision, compute_dtype=compute_dtype,
                kv_cache_dtype=kv_cache_dtype, max_total_tokens=max_total_tokens, max_rows=max_rows, cpu=cpu,
                available=available - 2 * size,
            ),
            environment=launch.environment(settings, cpu=cpu),
            start_timeout_s=settings.start_timeout_s,
            temporary_variables=("VLLM_RPC_BASE_PATH",),
            stall_timeout_s=settings.stall_timeout_s,
        )  # fmt: skip
        self._probe = probe
        self._probe_ids = probe_ids(config.vocab_size, max_total_tokens)
        self._probe_tolerance = settings.probe_tolerance or launch.default_probe_tolerance(precision, kv_cache_dtype)
        self._publication: _Publication | None = None
        self._published = 0
        self._segments: tuple[Segment, ...] = ()
        try:
            self._segments = tuple(Segment(f"dcmdp-weights-{index}", size) for index in range(2))
            listed = [list(tensor) for tensor in self._bridge.manifest]
            self._supervisor = Supervisor(
                how_to_start.name,
                lambda: Sidecar(how_to_start, listed, self._segments, size),
                max_restarts=settings.max_restarts,
            )
        except BaseException:
            for segment in self._segments:
                segment.close()
            raise

    @property
    def policy_version(self) -> int | None:
        """Version of the weights last published; None before."""
        return None if self._publication is None else self._publication.policy_version

    def publish_weights(self, params: Params, policy_version: int) -> None:
        """Writes the parameters into the free half of the double buffer; the next call has the engine load them.

        Disturbs no call in progress: that one ends with the weights it began with, even if its sidecar has to be
        started again. That is one call's worth of room: publish again only when it has ended.

        Raises:
            ValueError: for parameters that are not those of the model.
        """
        check_params(params, self.config)
        serial, policy_version = self._published + 1, int(policy_version)
        checksums = self._bridge.publish(params, self._segments[serial % 2], policy_version)
        probe = None if self._probe is None else self._probe(params, self._probe_ids)
        self._published = serial
        self._publication = _Publication(serial, policy_version, checksums, probe)

    def push_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Publishes the parameters and has the engine load them; returns when they are proven to be in use.

        The proof: the sidecar's checksum of each tensor as the model took it is the trainer's, the prefix cache was
        emptied, and the engine's log-probs of fixed sequences are near the trainer's own. A sidecar that fails it is
        never used half-updated: it is started again and gets the weights again.

        Returns:
            "mismatch/probe": mean |log p_train - log p_engine| over the probe, nats.

        Raises:
            ValueError: for parameters that are not those of the model.
            EngineError: if it fails again and again, or if the trainer's own log-probs are not finite.
        """
        self.publish_weights(params, policy_version)
        publication = self._publication
        difference = self._supervisor.run(lambda sidecar: self._load(sidecar, publication))
        return {} if difference is None else {"mismatch/probe": difference}

    def _load(self, sidecar: Sidecar, publication: _Publication) -> float | None:
        version = publication.policy_version
        # Until the answer is here, the sidecar has no weights that could be used.
        sidecar.serial = None
        header, arrays = sidecar.request(
            "push", {"segment": publication.serial % 2, "policy_version": version}, answer="pushed"
        )
        checksums = arrays.get("checksums", np.empty(0))
        if checksums.ndim != 2 or not len(checksums) or checksums.shape[1] != len(self._bridge.manifest):
            raise SidecarBroken(f"weights of version {version}: checksums of shape {checksums.shape} in the answer")
        for consumed in checksums:
            if wrong := differing(self._bridge.manifest, publication.checksums, consumed):
                raise SidecarBroken(
                    f"weights of version {version}: {wrong[0]} and {len(wrong) - 1} more arrived changed"
                )
        if header.get("policy_version") != version:
            raise SidecarBroken(f"weights of version {version}: the sidecar says {header.get('policy_version')}")
        difference = None
        if publication.probe is not None:
            difference = self._probed(sidecar, publication)
        sidecar.serial = publication.serial
        return difference

    def _probed(self, sidecar: Sidecar, publication: _Publication) -> float:
        scored = self._scored(sidecar, list(self._probe_ids), [1] * len(self._probe_ids), 1.0)
        own = np.asarray(publication.probe)
        if not np.isfinite(own).all():
            raise EngineError(
                f"weights of version {publication.policy_version}: the trainer's own log-probs of the probe are not "
                "finite; its parameters are broken"
            )
        difference = float(np.mean(np.abs(np.stack(scored) - own)))
        if not difference <= self._probe_tolerance:
            raise SidecarBroken(
                f"weights of version {publication.policy_version}: the engine's log-probs of the probe are "
                f"{difference:.3g} nats from the trainer's on average, allowed are {self._probe_tolerance:g} "
                "(rollout.vllm.probe_tolerance)"
            )
        return difference

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """Samples `group_size` completions for each prompt.

        A sidecar that breaks on the way is started again and samples the whole call again, which gives the same bits;
        what was yielded is not yielded again.

        Args:
            prompts: int32 token ids, one array per prompt.
            sampling: the distribution.
            seed, step: 0 .. 2^32 - 1; with the row they determine the request's seed.
            first_prompt: number of the first prompt, see `Engine.generate`.

        Returns:
            The groups that are complete, maybe none, every half second.

        Raises:
            ValueError: as `LocalEngine.generate`, or for a temperature that vLLM does not take as it is. No request was
                begun then.
            EngineError: if no weights were published, or the sidecar fails again and again.
        """
        if self._publication is None:
            raise EngineError("no weights: push_weights must come before generate")
        launch.check_temperature(sampling.temperature)
        prompts = checked_sequences(
            prompts, "prompt", vocab_size=self.config.vocab_size, limit=self.max_total_tokens,
            reserve=sampling.max_completion_tokens,
        )  # fmt: skip
        header = {
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "max_tokens": sampling.max_completion_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
            }
        }
        group_size, count = sampling.group_size, len(prompts) * sampling.group_size
        arrays = {
            "prompt_ids": np.concatenate(prompts),
            "prompt_lengths": np.array([prompt.size for prompt in prompts], np.int32),
            "prompt_of_row": np.repeat(np.arange(len(prompts), dtype=np.int32), group_size),
            "seeds": request_seeds(seed, step, first_prompt * group_size + np.arange(count)),
        }
        publication = self._publication
        version = publication.policy_version
        trust = _Trust()
        delivered: set[int] = set()

        def sample(sidecar: Sidecar) -> Iterator[list[Episode]]:
            self._ensure(sidecar, publication)
            rows: set[int] = set()
            waiting = OpenGroups(group_size)
            for message in sidecar.stream("generate", header, arrays, answer="generated"):
                completions = checked_completions(message.arrays, count, sampling, self.config.vocab_size)
                if message.header.get("policy_version") != version:
                    raise SidecarBroken(f"generate: sampled with version {message.header.get('policy_version')}")
                trust.check([completion.logprobs for completion in completions])
                if again := [completion.row for completion in completions if completion.row in rows]:
                    raise SidecarBroken(f"generate: completion {again[0]} arrived twice")
                rows.update(completion.row for completion in completions)
                episodes = waiting.add(
                    single_turn(
                        prompts[row // group_size],
                        tokens,
                        logprobs,
                        policy_version=version,
                        group=row // group_size,
                        member=row % group_size,
                        finish_reason=reason,
                    )
                    for row, tokens, logprobs, reason in completions
                )
                fresh = [episode for episode in episodes if episode.group not in delivered]
                delivered.update(episode.group for episode in fresh)
                yield fresh
            if len(rows) < count:
                raise SidecarBroken(f"generate: {len(rows)} completions for {count} requests")

        return self._supervisor.stream(sample)

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        """The engine's own log-probs of given completions, each row in one pass as a prompt.

        They differ from those reported while sampling by rounding alone: the engine's noise floor.

        Args:
            prompts: int32 token ids, one array per completion.
            completions: int32 token ids.
            temperature: divides the logits; 0 gives the log-probs at temperature 1, as `generate` does.

        Returns:
            Per completion [T] float32 nats, full support.

        Raises:
            ValueError, EngineError: as `LocalEngine.score`.
        """
        if self._publication is None:
            raise EngineError("no weights: push_weights must come before score")
        if not temperature >= 0:
            raise ValueError(f"temperature: got {temperature}, must be 0 (scored at 1) or above")
        prompts, rows = scored_rows(
            prompts, completions, vocab_size=self.config.vocab_size, limit=self.max_total_tokens
        )

        publication, trust = self._publication, _Trust()

        def scored(sidecar: Sidecar) -> list[np.ndarray]:
            self._ensure(sidecar, publication)
            values = self._scored(sidecar, rows, [prompt.size for prompt in prompts], temperature or 1.0)
            trust.check(values)
            return values

        results = self._supervisor.run(scored)
        check_finite(results)
        return results

    def close(self) -> None:
        """Ends the sidecar and gives the shared memory back. Safe to call twice."""
        self._supervisor.close()
        self._publication = None
        for segment in self._segments:
            segment.close()

    def _ensure(self, sidecar: Sidecar, publication: _Publication) -> None:
        """Loads the publication where it is not in use: a restarted sidecar has no weights."""
        if sidecar.serial != publication.serial:
            self._load(sidecar, publication)

    def _scored(
        self, sidecar: Sidecar, rows: list[np.ndarray], starts: list[int], temperature: float
    ) -> list[np.ndarray]:
        arrays = {
            "row_ids": np.concatenate(rows).astype(np.int32),
            "row_lengths": np.array([row.size for row in rows], np.int32),
            "starts": np.array(starts, np.int32),
        }
        reply = sidecar.request("score", {"temperature": temperature}, arrays, answer="scored")
        logprobs = reply.arrays.get("logprobs", np.empty(0))
        lengths = arrays["row_lengths"] - arrays["starts"]
        if logprobs.shape != (lengths.sum(),):
            raise SidecarBroken(f"score: {logprobs.shape} log-probs for {lengths.sum()} tokens")
        return np.split(logprobs, np.cumsum(lengths)[:-1])


class _Trust:
    """Doubts the first log-probs of a call that are not finite, once.

    A process gone wrong gives other numbers when it is started again. The weights' own NaN come back, and what becomes
    of those is the trainer's to decide (`validation.unusable_completions`).
    """

    def __init__(self) -> None:
        self._doubted = False

    def check(self, values: Sequence[np.ndarray]) -> None:
        """Raise SidecarBroken if a value is not finite, unless one was not finite before."""
        if not self._doubted and not all(np.isfinite(array).all() for array in values):
            self._doubted = True
            raise SidecarBroken("log-probs that are not finite")

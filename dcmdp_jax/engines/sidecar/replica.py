"""One sidecar of an engine: it loads the published weights, samples and scores, and does so again after a restart."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import numpy as np

from dcmdp_jax.data.episode import Episode, OpenGroups, single_turn
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.engines.sidecar.manifest import differing
from dcmdp_jax.engines.sidecar.process import Sidecar, SidecarBroken
from dcmdp_jax.engines.sidecar.replies import checked_completions, split_columns
from dcmdp_jax.engines.sidecar.supervisor import Supervisor
from dcmdp_jax.engines.sidecar.weights import Publication, SharedWeights
from dcmdp_jax.engines.vllm_common import request_seeds

# vLLM's second level of sleep discards the weights.
_DISCARDS = 2


class Replica:
    """Calls are generators, for `supervisor.in_turn`: replicas work at the same time.

    A sidecar that dies, hangs or answers nonsense is started again, gets the weights again out of shared memory, and
    is asked again; log-probs that are not finite are asked for once more of a new one before they are believed.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        weights: SharedWeights,
        *,
        probe_tolerance: float,
        sleep_level: int,
        routed_experts: bool = False,
    ) -> None:
        """Store the arguments.

        Args:
            supervisor: of the sidecar.
            weights: to load from.
            probe_tolerance: mean |log p_train - log p_engine| over the probe that the engine may have, nats.
            sleep_level: of vLLM's sleep mode, after each call; 0 leaves the engine awake.
            routed_experts: the sidecar was asked for the experts of each token, so it must return them.
        """
        self.supervisor = supervisor
        self._weights, self._probe_tolerance, self._sleep_level = weights, probe_tolerance, sleep_level
        self._routed_experts = routed_experts

    def load(self, publication: Publication) -> Generator[None, None, float | None]:
        """Have the engine load the weights; return their probe's difference, nats, when they are proven to be in use.

        Raises:
            EngineError: if it fails again and again, or if the trainer's own log-probs are not finite.
        """
        return self.supervisor.run(lambda sidecar: self._loaded(sidecar, publication))

    def _loaded(self, sidecar: Sidecar, publication: Publication) -> Generator[None, None, float | None]:
        version, manifest = publication.policy_version, self._weights.bridge.manifest
        # Until the answer is here, the sidecar has no weights that could be used.
        sidecar.serial = None
        header, arrays = yield from sidecar.ask(
            "push", {"segment": publication.serial % 2, "policy_version": version}, answer="pushed"
        )
        checksums = arrays.get("checksums", np.empty(0))
        if checksums.ndim != 2 or not len(checksums) or checksums.shape[1] != len(manifest):
            raise SidecarBroken(f"weights of version {version}: checksums of shape {checksums.shape} in the answer")
        for consumed in checksums:
            if wrong := differing(manifest, publication.checksums, consumed):
                raise SidecarBroken(
                    f"weights of version {version}: {wrong[0]} and {len(wrong) - 1} more arrived changed"
                )
        if header.get("policy_version") != version:
            raise SidecarBroken(f"weights of version {version}: the sidecar says {header.get('policy_version')}")
        difference = None
        if publication.probe is not None:
            difference = yield from self._probed(sidecar, publication)
        sidecar.serial = publication.serial
        return difference

    def _probed(self, sidecar: Sidecar, publication: Publication) -> Generator[None, None, float]:
        rows = list(self._weights.probe_ids)
        scored = yield from _scored(sidecar, rows, [1] * len(rows), temperature=1.0, sleep_level=0)
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
                "(`probe_tolerance`)"
            )
        return difference

    def _ensure(self, sidecar: Sidecar, publication: Publication) -> Generator[None, None, None]:
        """Load the published weights where they are not in use: a restarted sidecar has none."""
        if sidecar.serial != publication.serial:
            yield from self._loaded(sidecar, publication)

    def _fell_asleep(self, sidecar: Sidecar) -> None:
        if self._sleep_level == _DISCARDS:
            sidecar.serial = None

    def sample(
        self,
        publication: Publication,
        prompts: Mapping[int, np.ndarray],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Generator[list[Episode] | None, None, None]:
        """Sample `group_size` completions for each prompt; yield the groups that are complete, or None.

        Log-probs depend on batch composition by rounding, so a sidecar that breaks on the way samples all of these
        prompts again, which gives the same bits; what was yielded is not yielded again.

        Args:
            publication: weights to sample with.
            prompts: by group, checked token ids.
            sampling: the distribution.
            seed, step: 0 .. 2^32 - 1; with the row `(first_prompt + group) * group_size + member` they determine a
                request's seed.
            first_prompt: number of group 0, see `Engine.generate`.

        Raises:
            ValueError: for a seed or step out of range, at once.
            EngineError: if the sidecar fails again and again.
        """
        groups, group_size = list(prompts), sampling.group_size
        count = len(groups) * group_size
        header = {
            "sampling": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p if sampling.temperature else 1.0,
                "max_tokens": sampling.max_completion_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            "sleep_level": self._sleep_level,
        }
        arrays = {
            "prompt_ids": np.concatenate(list(prompts.values())),
            "prompt_lengths": np.array([prompt.size for prompt in prompts.values()], np.int32),
            "prompt_of_row": np.repeat(np.arange(len(groups), dtype=np.int32), group_size),
            "seeds": request_seeds(
                seed, step, [(first_prompt + g) * group_size + member for g in groups for member in range(group_size)]
            ),
        }
        version = publication.policy_version
        trust = _Trust()
        delivered: set[int] = set()

        def sampled(sidecar: Sidecar) -> Generator[list[Episode] | None, None, None]:
            yield from self._ensure(sidecar, publication)
            rows: set[int] = set()
            waiting = OpenGroups(group_size)
            for message in sidecar.stream("generate", header, arrays, answer="generated"):
                if message is None:
                    yield None
                    continue
                completions = checked_completions(message.arrays, count, sampling, self._weights.config.vocab_size)
                if message.header.get("policy_version") != version:
                    raise SidecarBroken(f"generate: sampled with version {message.header.get('policy_version')}")
                trust.check([completion.logprobs for completion in completions])
                if again := [completion.row for completion in completions if completion.row in rows]:
                    raise SidecarBroken(f"generate: completion {again[0]} arrived twice")
                rows.update(completion.row for completion in completions)
                asked = self._routed_experts and completions
                columns = split_columns(
                    message.arrays,
                    [prompts[groups[completion.row // group_size]].size for completion in completions],
                    [completion.token_ids.size for completion in completions],
                    {"routed_experts": self._weights.config.routing[:2]} if asked else {},
                )
                episodes = waiting.add(
                    single_turn(
                        prompts[groups[row // group_size]],
                        tokens,
                        logprobs,
                        policy_version=version,
                        group=groups[row // group_size],
                        member=row % group_size,
                        finish_reason=reason,
                        **further,
                    )
                    for (row, tokens, logprobs, reason), further in zip(completions, columns, strict=True)
                )
                fresh = [episode for episode in episodes if episode.group not in delivered]
                delivered.update(episode.group for episode in fresh)
                yield fresh
            if len(rows) < count:
                raise SidecarBroken(f"generate: {len(rows)} completions for {count} requests")
            self._fell_asleep(sidecar)

        return self.supervisor.run(sampled)

    def score(
        self, publication: Publication, rows: Sequence[np.ndarray], starts: Sequence[int], *, temperature: float
    ) -> Generator[None, None, list[np.ndarray]]:
        """Return the engine's own log-probs of rows, float32 nats: of their tokens from `starts` on.

        Raises:
            EngineError: if the sidecar fails again and again.
        """
        trust = _Trust()

        def scored(sidecar: Sidecar) -> Generator[None, None, list[np.ndarray]]:
            yield from self._ensure(sidecar, publication)
            values = yield from _scored(sidecar, rows, starts, temperature=temperature, sleep_level=self._sleep_level)
            trust.check(values)
            self._fell_asleep(sidecar)
            return values

        return self.supervisor.run(scored)


def _scored(
    sidecar: Sidecar, rows: Sequence[np.ndarray], starts: Sequence[int], *, temperature: float, sleep_level: int
) -> Generator[None, None, list[np.ndarray]]:
    arrays = {
        "row_ids": np.concatenate(rows).astype(np.int32),
        "row_lengths": np.array([row.size for row in rows], np.int32),
        "starts": np.array(starts, np.int32),
    }
    header = {"temperature": temperature, "sleep_level": sleep_level}
    reply = yield from sidecar.ask("score", header, arrays, answer="scored")
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

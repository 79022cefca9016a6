"""One sidecar of an engine: loads published weights, samples and scores, also when restarted."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from dcmdp_jax.data.episode import (
    COLUMNS,
    TOP_IDS,
    TOP_LOGPROBS,
    Episode,
    OpenGroups,
    Shape,
    single_turn,
)
from dcmdp_jax.engines.protocol import EngineError, SamplingParams
from dcmdp_jax.engines.sidecar import segments
from dcmdp_jax.engines.sidecar.process import EngineProcess, SidecarBroken
from dcmdp_jax.engines.sidecar.supervisor import Calls, Supervisor
from dcmdp_jax.engines.sidecar.weights import Publication, SharedWeights
from dcmdp_jax.engines.sidecar.wire import Arrays, Fields, Message

T = TypeVar("T")

# The level of the engine's sleep that drops the weights.
_DROPS_WEIGHTS = 2


@dataclasses.dataclass(eq=False)
class Replica:
    """A supervised sidecar, with the calls of an engine.

    Calls block, each in a thread of `supervisor.Calls`: replicas work at the same time.

    A sidecar that dies, hangs or answers nonsense is started again, gets the weights again out of
    shared memory, and is asked again; log-probs that are not finite are asked for once more of a
    new one before they are believed.

    Attributes:
        supervisor: keeps the sidecar running.
        weights: shared memory to load from.
        probe_tolerance: mean |log p_train - log p_engine| over the probe that the engine may have,
            nats.
        request_seeds: (seed, step, rows) -> [n] integers, the seed of each row's request.
        sleep_level: level of the engine's sleep after each call; 0 leaves it awake.
        routed_experts: the sidecar was asked for the experts of each token, so it must return them.
        top_logprobs: k, the top-k tokens to ask for wherever the draw is not greedy; 0: none.
    """

    supervisor: Supervisor
    weights: SharedWeights
    probe_tolerance: float
    request_seeds: Callable[[int, int, Sequence[int]], np.ndarray]
    sleep_level: int
    routed_experts: bool
    top_logprobs: int

    def load(self, calls: Calls, publication: Publication) -> float | None:
        """Have the engine load the weights; return their probe's difference, nats, once in use.

        Raises:
            EngineError: if it fails again and again, or if the trainer's own log-probs are not
                finite.
        """
        return self.supervisor.run(calls, lambda sidecar: self._load(sidecar, calls, publication))

    def _load(self, sidecar: EngineProcess, calls: Calls, publication: Publication) -> float | None:
        if sidecar.serial == publication.serial:
            return None
        if sidecar.serial is None and publication.base:
            self._sync(sidecar, calls, publication.base)
        # Until the answer is here, the sidecar has no weights that could be used.
        sidecar.serial = None
        self._sync(sidecar, calls, publication)
        difference = None
        if publication.probe is not None:
            difference = self._probe(sidecar, calls, publication)
        sidecar.serial = publication.serial
        return difference

    def _sync(self, sidecar: EngineProcess, calls: Calls, publication: Publication) -> None:
        """Have the engine load what was published, and compare the checksums."""
        version = publication.policy_version
        manifest = publication.bridge.manifest
        request = {"segment": publication.location, "policy_version": version}
        lora = publication.bridge.lora
        if lora:
            request["adapters"] = (
                publication.bridge.num_bytes,
                segments.wire_manifest(manifest),
                (lora.rank, lora.alpha),
            )
        reply = sidecar.request(
            "sync",
            request,
            answer="synced",
            stopped=calls.stopped,
        )

        checksums = reply.arrays.get("checksums", np.empty(0))
        if checksums.ndim != 2 or not len(checksums) or checksums.shape[1] != len(manifest):
            raise SidecarBroken(
                f"weights of version {version}: checksums of shape {checksums.shape} in the answer"
            )
        for consumed in checksums:
            wrong = segments.differing(manifest, publication.checksums, consumed)
            if wrong:
                raise SidecarBroken(
                    f"weights of version {version}: {wrong[0]} and {len(wrong) - 1} more arrived "
                    "changed"
                )
        loaded_version = reply.header.get("policy_version")
        if loaded_version != version:
            raise SidecarBroken(f"weights of version {version}: the process says {loaded_version}")

    def _probe(self, sidecar: EngineProcess, calls: Calls, publication: Publication) -> float:
        version = publication.policy_version
        rows = list(self.weights.probe_ids)
        engine_logprobs = _score(
            sidecar,
            calls,
            rows=rows,
            starts=[1] * len(rows),
            header={"temperature": 1.0, "sleep_level": 0},
        )
        trainer_logprobs = np.asarray(publication.probe)
        if not np.isfinite(trainer_logprobs).all():
            raise EngineError(
                f"weights of version {version}: the trainer's own log-probs of the probe are not "
                "finite; its parameters are broken"
            )

        difference = float(np.mean(np.abs(np.stack(engine_logprobs) - trainer_logprobs)))
        if not difference <= self.probe_tolerance:
            raise SidecarBroken(
                f"weights of version {version}: the engine's log-probs of the probe are "
                f"{difference:.3g} nats from the trainer's on average, allowed are "
                f"{self.probe_tolerance:g} (`probe_tolerance`)"
            )
        return difference

    def _run(self, calls: Calls, publication: Publication, call: Callable[[EngineProcess], T]) -> T:
        """Return what `call` returns on a sidecar with the published weights, loaded if need be."""

        def load_and_call(sidecar: EngineProcess) -> T:
            self._load(sidecar, calls, publication)
            result = call(sidecar)
            if self.sleep_level == _DROPS_WEIGHTS:
                sidecar.serial = None
            return result

        return self.supervisor.run(calls, load_and_call)

    def sample(
        self,
        publication: Publication,
        prompts: Mapping[int, np.ndarray],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int,
    ) -> Callable[[Calls], None]:
        """A call that samples `group_size` completions for each prompt; it puts complete groups.

        Log-probs depend on batch composition by rounding, so a sidecar that breaks on the way
        samples all of these prompts again, which gives the same bits; what was put is not put
        again.

        Args:
            publication: weights to sample with.
            prompts: group -> checked token ids.
            sampling: the distribution.
            seed, step: 0 .. 2^32 - 1; with the row `(first_prompt + group) * group_size + member`
                they determine a request's seed.
            first_prompt: number of group 0, see `Engine.generate`.

        Raises:
            ValueError: for a seed or step out of range, at once.
            EngineError: if the sidecar fails again and again.
        """
        top_logprobs = self.top_logprobs if sampling.temperature else 0
        column_shapes = {}
        if top_logprobs:
            column_shapes |= {TOP_IDS: (top_logprobs,), TOP_LOGPROBS: (top_logprobs,)}
        if self.routed_experts:
            column_shapes["routed_experts"] = self.weights.config.routing[:2]

        group_size = sampling.group_size
        row_numbers = []
        for group in prompts:
            first_row = (first_prompt + group) * group_size
            row_numbers += range(first_row, first_row + group_size)
        sampling_fields = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_completion_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        request = _SampleRequest(
            prompts=prompts,
            sampling=sampling,
            policy_version=publication.policy_version,
            vocab_size=self.weights.config.vocab_size,
            column_shapes=column_shapes,
            header={
                "sampling": sampling_fields,
                "sleep_level": self.sleep_level,
                "top_logprobs": top_logprobs,
            },
            seeds=self.request_seeds(seed, step, row_numbers),
        )

        def call(calls: Calls) -> None:
            self._run(calls, publication, lambda sidecar: request.send(sidecar, calls))

        return call

    def score(
        self,
        calls: Calls,
        publication: Publication,
        rows: Sequence[np.ndarray],
        starts: Sequence[int],
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """The engine's own log-probs of rows, float32 nats: of their tokens from `starts` on.

        Raises:
            EngineError: if the sidecar fails again and again.
        """
        trust = _Trust()
        header = {"temperature": temperature, "sleep_level": self.sleep_level}

        def score(sidecar: EngineProcess) -> list[np.ndarray]:
            values = _score(sidecar, calls, rows, starts, header)
            trust.check(values)
            return values

        return self._run(calls, publication, score)

    def observe(
        self,
        calls: Calls,
        publication: Publication,
        rows: Sequence[np.ndarray],
        modules: Sequence[str],
    ) -> Arrays:
        """Return what modules of the engine's network read and gave for the rows, as it came."""
        header = {"modules": list(modules), "sleep_level": self.sleep_level}

        def observe(sidecar: EngineProcess) -> Arrays:
            reply = sidecar.request(
                "observe",
                header,
                _rows(rows),
                answer="observed",
                stopped=calls.stopped,
            )
            return reply.arrays

        return self._run(calls, publication, observe)


@dataclasses.dataclass(eq=False, kw_only=True)
class _SampleRequest:
    """One request "generate", which may be sent to several sidecars until one has answered it.

    Attributes:
        prompts: group -> token ids.
        sampling: the distribution.
        policy_version: version of the weights that must have sampled.
        vocab_size: number of the model's tokens.
        column_shapes: shape of an entry of each further column that must come.
        header: fields of the request.
        seeds: [rows] integers, the seed of each row.
    """

    prompts: Mapping[int, np.ndarray]
    sampling: SamplingParams
    policy_version: int
    vocab_size: int
    column_shapes: Mapping[str, Shape]
    header: Fields
    seeds: np.ndarray

    def __post_init__(self) -> None:
        self._groups = list(self.prompts)
        self._count = len(self._groups) * self.sampling.group_size
        self._trust = _Trust()
        # Groups that were put, by any of the sidecars.
        self._delivered: set[int] = set()

    def send(self, sidecar: EngineProcess, calls: Calls) -> None:
        """Have a sidecar sample all rows; put each group when it is complete.

        Raises:
            SidecarBroken: if something about its answer can't be right.
        """
        rows: set[int] = set()
        open_groups = OpenGroups(self.sampling.group_size)

        def receive(frame: Message) -> None:
            """Put the groups that the completions of a frame complete."""
            completions = self._checked(frame, rows)
            for completion in completions:
                sidecar.work["tokens"] += completion.token_ids.size
                rows.add(completion.row)
            groups = open_groups.add(self._episodes(frame, completions))
            fresh = [episode for episode in groups if episode.group not in self._delivered]
            self._delivered.update(episode.group for episode in fresh)
            calls.put(fresh)

        last_frame = sidecar.request(
            "generate",
            self.header,
            self._arrays(),
            answer="generated",
            stopped=calls.stopped,
            on_progress=receive,
        )
        receive(last_frame)
        if len(rows) < self._count:
            raise SidecarBroken(f"generate: {len(rows)} completions for {self._count} requests")

    def _arrays(self) -> Arrays:
        prompts = list(self.prompts.values())
        numbers = np.arange(len(prompts), dtype=np.int32)
        return {
            "prompt_ids": np.concatenate(prompts),
            "prompt_lengths": np.array([prompt.size for prompt in prompts], np.int32),
            "prompt_of_row": np.repeat(numbers, self.sampling.group_size),
            "seeds": self.seeds,
        }

    def _checked(self, frame: Message, rows: set[int]) -> "list[SampledRow]":
        """The completions of a frame; `rows` are those that came before."""
        completions = checked_completions(frame.arrays, self._count, self.sampling, self.vocab_size)
        version = frame.header.get("policy_version")
        if version != self.policy_version:
            raise SidecarBroken(f"generate: sampled with version {version}")
        self._trust.check([completion.logprobs for completion in completions])
        for completion in completions:
            if completion.row in rows:
                raise SidecarBroken(f"generate: completion {completion.row} arrived twice")
        return completions

    def _episodes(self, frame: Message, completions: "Sequence[SampledRow]") -> Iterator[Episode]:
        """The completions of a frame with their prompts and further columns."""
        group_size = self.sampling.group_size
        groups = [self._groups[completion.row // group_size] for completion in completions]
        columns = split_columns(
            frame.arrays,
            prompts=[self.prompts[group].size for group in groups],
            completions=[completion.token_ids.size for completion in completions],
            expected=self.column_shapes if completions else {},
        )
        for completion, group, further in zip(completions, groups, columns, strict=True):
            yield single_turn(
                self.prompts[group],
                completion.token_ids,
                completion.logprobs,
                policy_version=self.policy_version,
                group=group,
                member=completion.row % group_size,
                finish_reason=completion.finish_reason,
                **further,
            )


def _rows(rows: Sequence[np.ndarray]) -> Arrays:
    return {
        "row_ids": np.concatenate(rows).astype(np.int32),
        "row_lengths": np.array([row.size for row in rows], np.int32),
    }


def _score(
    sidecar: EngineProcess,
    calls: Calls,
    rows: Sequence[np.ndarray],
    starts: Sequence[int],
    header: Fields,
) -> list[np.ndarray]:
    arrays = _rows(rows) | {"starts": np.array(starts, np.int32)}
    reply = sidecar.request("score", header, arrays, answer="scored", stopped=calls.stopped)
    logprobs = reply.arrays.get("logprobs", np.empty(0))
    lengths = arrays["row_lengths"] - arrays["starts"]
    if logprobs.shape != (lengths.sum(),):
        raise SidecarBroken(f"score: {logprobs.shape} log-probs for {lengths.sum()} tokens")
    return np.split(logprobs, np.cumsum(lengths)[:-1])


class _Trust:
    """Check that rejects the first log-probs of a call that are not finite, once.

    A process gone wrong gives other numbers when it is started again. The weights' own NaN come
    back, and what becomes of those is the trainer's to decide (`protocol.unusable_completions`).
    """

    _doubted = False

    def check(self, values: Sequence[np.ndarray]) -> None:
        """Raise SidecarBroken if a value is not finite, unless one was not finite before."""
        if self._doubted:
            return
        for array in values:
            if not np.isfinite(array).all():
                self._doubted = True
                raise SidecarBroken("log-probs that are not finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledRow:
    """A completion that has ended.

    Attributes:
        row: `prompt * group_size + member`.
        token_ids: [T] int32.
        logprobs: [T] float32 nats.
        finish_reason: "stop" or "length".
    """

    row: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str


def split_columns(
    arrays: Arrays,
    prompts: Sequence[int],
    completions: Sequence[int],
    expected: Mapping[str, Shape],
) -> list[Arrays]:
    """The further columns of `data.episode.COLUMNS` in a frame, for each completion.

    A column that given tokens have comes for a prompt's tokens and the completion's own but the
    last, which is not read; another for the completion's tokens. Completions follow each other on
    the first axis.

    Args:
        arrays: arrays of the frame.
        prompts, completions: tokens of each completion's prompt, and its own.
        expected: shape of an entry of the columns that must be there. Others may be.

    Raises:
        SidecarBroken: if a column is not there, or of another shape. `protocol` looks at the
            values.
    """
    columns_by_completion = [{} for _ in completions]
    for name, column in COLUMNS.items():
        if name not in arrays and name not in expected:
            continue
        counts = np.array(completions, np.int64)
        if column.covers_given:
            counts = counts + np.array(prompts, np.int64) - 1
        values = arrays.get(name, np.empty(0))
        shape = (int(counts.sum()), *expected.get(name, values.shape[1:]))
        if values.shape != shape:
            label = name.replace("_", " ")
            raise SidecarBroken(f"generate: {label} of shape {values.shape}, expected {shape}")
        entries = np.split(values, np.cumsum(counts)[:-1])
        for columns, own_entries in zip(columns_by_completion, entries, strict=True):
            columns[name] = own_entries
    return columns_by_completion


def checked_completions(
    arrays: Arrays,
    count: int,
    sampling: SamplingParams,
    vocab_size: int,
) -> list[SampledRow]:
    """The completions of one frame, after all checks that can be made; none without arrays.

    Raises:
        SidecarBroken: saying what can't be right.
    """
    if not arrays:
        return []

    try:
        rows = arrays["rows"]
        tokens = arrays["token_ids"]
        logprobs = arrays["logprobs"]
        lengths = arrays["lengths"]
        stopped = arrays["stopped"]
    except KeyError as error:
        raise SidecarBroken(f"generate: no {error} in the answer") from None

    if not rows.shape == lengths.shape == stopped.shape == (rows.size,) or not rows.size:
        raise SidecarBroken(
            f"generate: {lengths.size} lengths and {stopped.size} finish reasons of {rows.size} "
            "rows"
        )
    if rows.min() < 0 or rows.max() >= count or np.unique(rows).size < rows.size:
        raise SidecarBroken(
            f"generate: {rows.size} rows from {rows.min()} to {rows.max()}, not of {count} requests"
        )
    if lengths.min() < 1 or lengths.max() > sampling.max_completion_tokens:
        raise SidecarBroken(
            f"generate: completions of {lengths.min()} to {lengths.max()} tokens, the limit is "
            f"{sampling.max_completion_tokens}"
        )
    if not tokens.shape == logprobs.shape == (lengths.sum(),):
        raise SidecarBroken(
            f"generate: {tokens.size} tokens and {logprobs.size} log-probs, not {lengths.sum()}"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise SidecarBroken(
            f"generate: token ids {tokens.min()} to {tokens.max()}, the model has fewer"
        )

    ends = np.cumsum(lengths)
    last_is_stop = np.isin(tokens[ends - 1], sampling.stop_token_ids)
    if not np.array_equal(last_is_stop, stopped.astype(bool)):
        raise SidecarBroken("generate: a completion's finish reason does not fit its last token")

    completions = []
    for row, end, length, is_stop in zip(rows.tolist(), ends, lengths, stopped, strict=True):
        tokens_of_row = slice(end - length, end)
        finish_reason = "length"
        if is_stop:
            finish_reason = "stop"
        completion = SampledRow(
            row=row,
            token_ids=tokens[tokens_of_row],
            logprobs=logprobs[tokens_of_row],
            finish_reason=finish_reason,
        )
        completions.append(completion)
    return completions

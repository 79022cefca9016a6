"""The embedded inference engine: samples completions in JAX, in the trainer's process."""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from dcmdp_jax.data.episode import Episode, OpenGroups, single_turn
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.forward import score as score_program
from dcmdp_jax.engines.local.layout import Program, engine_mesh, planned_mesh
from dcmdp_jax.engines.local.programs import Preparation, SamplingShapes, ScoringShape, Wait
from dcmdp_jax.engines.local.schedule import CallPlan, Completions, Scheduler
from dcmdp_jax.engines.local.sizes import (
    BatchSizes,
    batch_rows,
    default_cache_block,
    length_bucket,
    padded_rows,
    round_up,
    score_rows,
    smallest_batch,
)
from dcmdp_jax.engines.local.weights import conversion, conversion_mesh, share_copies
from dcmdp_jax.engines.protocol import (
    EngineError,
    SamplingParams,
    TokenRows,
    check_finite,
    checked_sequences,
    scored_rows,
)
from dcmdp_jax.models.params import check_params
from dcmdp_jax.models.sampler import Draw
from dcmdp_jax.parallel.backend import compile_beside
from dcmdp_jax.parallel.sharding import replicated, to_local
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)

Shapes = SamplingShapes | ScoringShape


class LocalEngine:
    """Implements the `Engine` protocol with compiled JAX programs.

    Sampling is a function of (seed, step, row): the random words of token t of a row come from
    fold_in(fold_in(fold_in(key(seed), step), row), t), whichever batch, bucket or chunk computes
    the row. Only the rounding of products depends on the batch, about 1e-6 in a float32 log-prob.

    Each prompt runs once, and its cache is copied to its rows. Queued rows refill a batch as others
    finish; when the queue is empty, the remaining rows move to batches of half the size. Rows that
    outgrow their cache continue together in one of twice the length (see `schedule.Scheduler`), so
    a long completion has a short cache while it is short, and does not lengthen the cache of
    others. Each new shape compiles once: prompt bucket x row count x cache length.
    """

    def __init__(
        self,
        arguments: EngineArguments,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        """Store the arguments; nothing is allocated before the first weight sync.

        Args:
            arguments: checked by `LocalKind.check`. `max_rows` bounds the memory of caches: with
                more rows than this to sample, up to three times that of a batch of the longest
                rows. With `prepare`, threads compile the programs that `first_calls` begin with
                from now on, and after each call all that later calls like it can need: for a
                training run, which keeps its memory. Lengths of what is scored are not known yet: a
                guess. Without it the memory of caches returns to the system after each call.
            mesh: in place of `arguments.mesh`. Rows are split over data, fsdp and expert, weights
                over tensor and expert. The devices of a mesh with other axes split rows; without
                any it is the first local device.
        """
        if mesh is None and arguments.mesh is not None:
            mesh = planned_mesh(arguments)
        self.program = Program.of(arguments, engine_mesh(mesh))
        platform = self.program.platform
        self.config = arguments.model
        self.max_total_tokens = arguments.max_total_tokens
        self._max_rows = arguments.max_rows
        self._min_rows = arguments.min_rows or smallest_batch(platform)
        self._cache_block = default_cache_block(platform)
        self.preparation = Preparation()
        self._prepares = arguments.prepare
        # Functions that wait for programs, by the shapes that they are compiled for.
        self._waits: dict[Shapes, list[Wait]] = {}
        for prompts, sampling in arguments.first_calls:
            if sampling is None:
                shape = self._scoring_shape(self.max_total_tokens, len(prompts))
                self._compile(shape, self.preparation.add)
                continue
            plan = self._plan(prompts, sampling)
            for bucket, _ in plan.buckets:
                shapes = _sampling_shapes(plan, bucket)
                self._compile(shapes.first, self.preparation.add)

        self.weights: Params | None = None
        self._policy_version: int | None = None
        # CRC-32 of the checksums of the weights in use (`weights.Conversion.proof`); None without
        # weights.
        self.weights_fingerprint: int | None = None

    def sync_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Copy the trainer's parameters in the engine's precision and verify the copy by checksums.

        Quantized precisions quantize again at every weight sync. The trainer may donate or delete
        `params` afterwards. Layers are copied one by one, each part to the devices that use it (see
        `weights.Conversion`).

        Returns:
            An empty dict: no metrics.

        Raises:
            ValueError: if the parameters do not match the model.
            EngineError: if the checksums of the engine's weights differ from the trainer's.
        """
        check_params(params, self.config)
        mesh = conversion_mesh(params, self.program.mesh)
        if mesh.size == 1:
            one_device = replicated(mesh)
            params = jax.tree.map(lambda leaf: to_local(leaf, one_device), params)
            params = jax.device_put(params, mesh.devices.flat[0])
        # Free the old weights first: two copies may not fit.
        self.release_weights()
        convert = conversion(self.config, self.program.precision, mesh)
        weights = convert.weights(params)
        expected, consumed = convert.proof(params, weights)
        wrong = np.count_nonzero(expected != consumed)
        if wrong:
            raise EngineError(
                f"weights of version {policy_version}: {wrong} of {expected.size} checksums differ"
            )
        self.weights = share_copies(weights, self.program.mesh)
        self._policy_version = policy_version
        self.weights_fingerprint = zlib.crc32(consumed.tobytes())
        logger.debug(
            "weights of version %d in use, checksum %08x",
            policy_version,
            self.weights_fingerprint,
        )
        return {}

    def generate(
        self,
        prompts: TokenRows,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """See `Engine.generate`. Samples while the caller waits for the next list.

        A list comes whenever a program returns. A weight sync of other weights in between changes
        nothing of this call.
        """
        if self.weights is None:
            raise EngineError("no weights: sync_weights must come before generate")
        for name, value in (("seed", seed), ("step", step)):
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}: got {value}, must be in 0 .. 2^32 - 1")
        prompts = checked_sequences(self, prompts, "prompt", reserve=sampling.max_completion_tokens)
        group = sampling.group_size
        plan = self._plan(prompts, sampling)
        completions = Completions(
            prompts,
            plan,
            self.program,
            seed,
            step,
            first_row=first_prompt * group,
        )
        weights = self.weights
        version = self._policy_version

        def episode(row: int) -> Episode:
            tokens = completions.tokens[row, : completions.sampled[row]]
            finish_reason = "length"
            if int(tokens[-1]) in sampling.stop_token_ids:
                finish_reason = "stop"
            return single_turn(
                prompts[row // group],
                tokens,
                completions.logprobs[row, : tokens.size],
                policy_version=version,
                group=row // group,
                member=row % group,
                finish_reason=finish_reason,
                **completions.columns_of(row),
            )

        def groups() -> Iterator[list[Episode]]:
            open_groups = OpenGroups(group)
            for bucket, members in plan.buckets:
                scheduler = Scheduler(
                    weights,
                    completions,
                    plan,
                    members,
                    bucket,
                    program=self.program,
                    trims=not self._prepares,
                )
                shapes = _sampling_shapes(plan, bucket)
                self._compile_now([shapes.first])
                for _ in scheduler.sample():
                    yield open_groups.add(map(episode, completions.take_finished()))
                # What later calls like this one can need.
                self._compile(shapes, self.preparation.add)
            yield open_groups.add(map(episode, completions.take_finished()))

        return groups()

    def _plan(self, prompts: TokenRows, sampling: SamplingParams) -> CallPlan:
        """Plan how `generate` samples the completions of these prompts."""
        group = sampling.group_size
        rows = batch_rows(self._max_rows, group, len(prompts) * group, 1)
        return CallPlan(
            mode=_mode(sampling, self.config.vocab_size),
            draw=Draw(
                inverse_temperature=_inverse_temperature(sampling.temperature),
                top_p=np.float32(sampling.top_p),
                stop_ids=np.asarray(sampling.stop_token_ids, np.int32),
            ),
            sizes=BatchSizes(
                rows=round_up(rows, self.program.mesh.size),
                min_rows=self._min_rows,
                cache_block=self._cache_block,
                limit=sampling.max_completion_tokens,
                devices=self.program.mesh.size,
            ),
            group=group,
            buckets=_by_bucket(prompts, -(-rows // group)),
        )

    def _compile(
        self,
        shapes: Shapes,
        in_thread: Callable[[Callable[[], None], str], Wait],
    ) -> list[Wait]:
        """Have programs compiled once, if this engine prepares its calls.

        Args:
            shapes: shapes of the programs.
            in_thread: starts the compilation of a program with a name; returns a function that
                waits for it.

        Returns:
            Functions that wait for the programs, whichever call had them compiled.
        """
        if not self._prepares:
            return []
        if shapes not in self._waits:
            compilations = shapes.compilations(self.program)
            self._waits[shapes] = [in_thread(program.run, program.name) for program in compilations]
        return self._waits[shapes]

    def _compile_now(self, all_shapes: Sequence[Shapes]) -> None:
        """Have the programs of these shapes compiled side by side, and wait for them."""
        waits = []
        for shapes in all_shapes:
            waits += self._compile(shapes, compile_beside)
        for wait in waits:
            wait()

    def _scoring_shape(self, tokens: int, count: int) -> ScoringShape:
        """The shape of a pass that scores `count` rows of this many tokens."""
        length = length_bucket(tokens)
        max_rows = min(self._max_rows, 1 << (count - 1).bit_length())
        rows = score_rows(self.config.num_heads, length, max_rows, self.program.row_shards)
        return ScoringShape(rows=rows, length=length)

    def score(
        self,
        prompts: TokenRows,
        completions: TokenRows,
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """See `Engine.score`; all tokens of a row in one pass."""
        if self.weights is None:
            raise EngineError("no weights: sync_weights must come before score")
        prompts, rows = scored_rows(self, prompts, completions, temperature)
        inverse = _inverse_temperature(temperature)
        buckets = [length_bucket(row.size) for row in rows]
        shapes = [
            self._scoring_shape(length, buckets.count(length)) for length in sorted(set(buckets))
        ]
        self._compile_now(shapes)

        results: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        for shape in shapes:
            members = np.flatnonzero(np.equal(buckets, shape.length)).tolist()
            for start in range(0, len(members), shape.rows):
                batch = members[start : start + shape.rows]
                padded = padded_rows([rows[index] for index in batch], shape.rows, shape.length)
                tokens, lengths = jax.device_put(padded, self.program.rows)
                logprobs = np.asarray(
                    score_program(self.weights, tokens, lengths, inverse, program=self.program)
                )
                for index, values in zip(batch, logprobs, strict=False):
                    completion = slice(prompts[index].size - 1, rows[index].size - 1)
                    results[index] = values[completion].copy()
        check_finite(results)
        return results

    def release_weights(self) -> None:
        """Free the weights; keep compiled programs."""
        self.weights = self._policy_version = self.weights_fingerprint = None

    def close(self) -> None:
        """Free the weights and drop programs that are not compiled yet. Safe to call twice."""
        self.release_weights()
        self.preparation.stop()


def _inverse_temperature(temperature: float) -> np.float32:
    """1 / temperature; 1 at temperature 0, whose log-probs are those of temperature 1."""
    if temperature == 0:
        return np.float32(1)
    return np.float32(1 / temperature)


def _mode(sampling: SamplingParams, vocab_size: int) -> str:
    """The mode of `sampler.choose_tokens` for a distribution."""
    if not sampling.temperature:
        return "greedy"
    mode = "nucleus"
    if sampling.top_p == 1:
        mode = "sample"
    if sampling.top_k:
        mode = f"{mode}:{min(sampling.top_k, vocab_size)}"
    return mode


def _sampling_shapes(plan: CallPlan, bucket: int) -> SamplingShapes:
    return SamplingShapes(
        batches=plan.sizes.batches(bucket),
        group=plan.group,
        stops=plan.draw.stop_ids.size,
        bucket=bucket,
        mode=plan.mode,
    )


def _by_bucket(prompts: TokenRows, fill: int) -> list[tuple[int, list[int]]]:
    """Group prompts by bucket, ascending.

    A bucket with fewer than `fill` prompts joins the next one in use.
    """
    buckets: list[tuple[int, list[int]]] = []
    for index in np.argsort([prompt.size for prompt in prompts], kind="stable").tolist():
        bucket = length_bucket(prompts[index].size)
        members: list[int] = []
        if buckets and (buckets[-1][0] == bucket or len(buckets[-1][1]) < fill):
            _, members = buckets.pop()
        buckets.append((bucket, [*members, index]))
    return buckets

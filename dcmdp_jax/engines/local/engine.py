"""The embedded inference engine: samples completions in JAX, in the trainer's process."""

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.data.episode import Episode, OpenGroups, single_turn
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.engines.local.forward import score as score_program
from dcmdp_jax.engines.local.layout import Program, engine_mesh
from dcmdp_jax.engines.local.programs import Preparation, sampling_programs, scoring_programs
from dcmdp_jax.engines.local.schedule import Completions, Scheduler, Sizes
from dcmdp_jax.engines.local.sizes import (
    batch_rows,
    default_cache_block,
    length_bucket,
    round_up,
    score_rows,
    smallest_batch,
)
from dcmdp_jax.engines.local.weights import conversion, conversion_mesh, share_copies
from dcmdp_jax.engines.protocol import (
    EngineError,
    SamplingParams,
    check_finite,
    checked_sequences,
    scored_rows,
)
from dcmdp_jax.models.params import check_params
from dcmdp_jax.models.sampler import Draw
from dcmdp_jax.parallel.backend import compile_beside
from dcmdp_jax.parallel.sharding import to_local
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)


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
        cache_block: int | None = None,
    ) -> None:
        """Store the arguments; nothing is allocated before the first push.

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
            cache_block: initial completion slots of the cache, doubled as rows fill them; each
                length is a program. None: `default_cache_block`.
        """
        if mesh is None and arguments.mesh is not None:
            mesh = arguments.mesh(
                tensor=arguments.settings.tensor, expert=arguments.settings.expert
            )
        self.program = Program.of(arguments, engine_mesh(mesh))
        platform = self.program.platform
        self.config = arguments.model
        self.precision = arguments.precision
        self.max_total_tokens = arguments.max_total_tokens
        self._max_rows = arguments.max_rows
        self._min_rows = arguments.min_rows or smallest_batch(platform)
        self._cache_block = cache_block or default_cache_block(platform)
        self.preparation = Preparation()
        self._prepares = arguments.prepare
        self._how = {"program": self.program, "dtype": arguments.param_dtype}
        self._compiled: dict[str, list[Callable[[], object]]] = {}
        for prompts, sampling in arguments.first_calls:
            if sampling is None:
                shape = self._scored(self.max_total_tokens, len(prompts))
                self._compile(self.preparation.add, scoring_programs, *shape)
                continue
            mode, draw, sizes, buckets = self._batches(prompts, sampling)
            for bucket, members in buckets:
                scheduler = Scheduler(
                    None, None, draw, mode, sizes, members, bucket, program=self.program
                )
                of = scheduler.shapes()[:1], sampling.group_size, draw.stop_ids.size, bucket, mode
                self._compile(self.preparation.add, sampling_programs, *of)
        self.weights: Params | None = None
        self._policy_version: int | None = None
        # CRC-32 of the checksums of the weights in use (`weights.Conversion.proof`); None without
        # weights.
        self.weights_fingerprint: int | None = None

    def push_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Copy the trainer's parameters in the engine's precision and verify the copy by checksums.

        Quantized precisions quantize again at every push. The trainer may donate or delete `params`
        afterwards. Layers are copied one by one, each part to the devices that use it (see
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
            own = jax.tree.map(lambda leaf: to_local(leaf, NamedSharding(mesh, P())), params)
            params = jax.device_put(own, mesh.devices.flat[0])
        # Free the old weights first: two copies may not fit.
        self.release_weights()
        convert = conversion(self.config, self.precision, mesh)
        weights = convert.weights(params)
        expected, consumed = convert.proof(params, weights)
        if (wrong := np.flatnonzero(expected != consumed)).size:
            raise EngineError(
                f"weights of version {policy_version}: {wrong.size} of {expected.size} checksums "
                "differ"
            )
        self.weights = share_copies(weights, self.program.mesh)
        self._policy_version = policy_version
        self.weights_fingerprint = zlib.crc32(consumed.tobytes())
        logger.debug(
            "weights of version %d in use, fingerprint %08x",
            policy_version,
            self.weights_fingerprint,
        )
        return {}

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """See `Engine.generate`. Samples while the caller waits for the next list, whenever a
        program returns.

        A push of other weights in between changes nothing of this call.
        """
        if self.weights is None:
            raise EngineError("no weights: push_weights must come before generate")
        for name, value in (("seed", seed), ("step", step)):
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}: got {value}, must be in 0 .. 2^32 - 1")
        prompts = checked_sequences(self, prompts, "prompt", reserve=sampling.max_completion_tokens)
        group = sampling.group_size
        limit = sampling.max_completion_tokens
        mode, draw, sizes, buckets = self._batches(prompts, sampling)
        routed = self.config.routing[:2] if self.program.routed_experts else None
        first_row = first_prompt * group
        asked = {"routed_shape": routed, "top": self.program.listed(mode)}
        sampled = Completions(prompts, group, limit, seed, step, first_row=first_row, **asked)
        weights = self.weights
        options = {"program": self.program, "trims": not self._prepares}
        version = self._policy_version
        stops = set(sampling.stop_token_ids)

        def episode(row: int) -> Episode:
            tokens = sampled.tokens[row, : sampled.sampled[row]]
            return single_turn(
                prompts[row // group],
                tokens,
                sampled.logprobs[row, : tokens.size],
                policy_version=version,
                group=row // group,
                member=row % group,
                finish_reason="stop" if int(tokens[-1]) in stops else "length",
                **sampled.columns_of(row),
            )

        def groups() -> Iterator[list[Episode]]:
            waiting = OpenGroups(group)
            for bucket, members in buckets:
                scheduler = Scheduler(
                    weights, sampled, draw, mode, sizes, members, bucket, **options
                )
                shapes = scheduler.shapes()
                of = (group, draw.stop_ids.size, bucket, mode)
                for wait in self._compile(compile_beside, sampling_programs, shapes[:1], *of):
                    wait()
                for _ in scheduler.sample():
                    yield waiting.add(map(episode, sampled.take_finished()))
                self._compile(self.preparation.add, sampling_programs, shapes, *of)
            yield waiting.add(map(episode, sampled.take_finished()))

        return groups()

    def _batches(self, prompts: Sequence[np.ndarray], sampling: SamplingParams) -> tuple[Any, ...]:
        """A call's mode and draw, shapes of its batches, and the prompts of each bucket."""
        mode = "sample" if sampling.top_p == 1 else "nucleus"
        mode += f":{min(sampling.top_k, self.config.vocab_size)}" if sampling.top_k else ""
        mode = mode if sampling.temperature else "greedy"
        inverse = np.float32(1 / sampling.temperature if sampling.temperature else 1)
        draw = Draw(
            inverse, np.float32(sampling.top_p), np.asarray(sampling.stop_token_ids, np.int32)
        )
        group = sampling.group_size
        limit = sampling.max_completion_tokens
        size = batch_rows(self._max_rows, group, len(prompts) * group, 1)
        sizes = Sizes(
            round_up(size, self.program.mesh.size), self._min_rows, self._cache_block, limit
        )
        return mode, draw, sizes, _by_bucket(prompts, -(-size // group))

    def _compile(
        self, in_thread: Callable, programs: Callable[..., list], *of: Any
    ) -> list[Callable[[], object]]:
        """Have programs compiled, if this engine prepares its calls; functions that wait for
        them.
        """
        if self._prepares and (key := str(of)) not in self._compiled:
            self._compiled[key] = [in_thread(*program) for program in programs(*of, **self._how)]
        return self._compiled.get(str(of), [])

    def _scored(self, tokens: int, count: int) -> tuple[int, int]:
        """Rows of a pass that scores so many of them, and the length that they are padded to."""
        length = length_bucket(tokens)
        most = min(self._max_rows, 1 << (count - 1).bit_length())
        return score_rows(self.config.num_heads, length, most, self.program.row_shards), length

    def score(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """See `Engine.score`; all tokens of a row in one pass."""
        if self.weights is None:
            raise EngineError("no weights: push_weights must come before score")
        prompts, rows = scored_rows(self, prompts, completions, temperature)
        inverse = np.float32(1 / temperature if temperature else 1)
        buckets = [length_bucket(row.size) for row in rows]
        shapes = [self._scored(length, buckets.count(length)) for length in sorted(set(buckets))]
        for wait in sum(
            [self._compile(compile_beside, scoring_programs, *shape) for shape in shapes], []
        ):
            wait()
        results: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        for size, length in shapes:
            members = [index for index, bucket in enumerate(buckets) if bucket == length]
            for start in range(0, len(members), size):
                part = members[start : start + size]
                padded = np.zeros((size, length), np.int32)
                lengths = np.ones(size, np.int32)
                for place, index in enumerate(part):
                    padded[place, : rows[index].size] = rows[index]
                    lengths[place] = rows[index].size
                padded, lengths = jax.device_put((padded, lengths), self.program.rows)
                logprobs = np.asarray(
                    score_program(self.weights, padded, lengths, inverse, program=self.program)
                )
                for place, index in enumerate(part):
                    results[index] = logprobs[
                        place, prompts[index].size - 1 : rows[index].size - 1
                    ].copy()
        check_finite(results)
        return results

    def release_weights(self) -> None:
        """Free the weights; keep compiled programs."""
        self.weights = self._policy_version = self.weights_fingerprint = None

    def close(self) -> None:
        """See `release_weights`; programs that are not compiled yet are not. Safe to call twice."""
        self.release_weights()
        self.preparation.stop()


def _by_bucket(prompts: list[np.ndarray], fill: int) -> list[tuple[int, list[int]]]:
    """Group prompts by bucket, ascending; a bucket with fewer than `fill` prompts joins the next
    one in use.
    """
    runs: list[tuple[int, list[int]]] = []
    for index in np.argsort([prompt.size for prompt in prompts], kind="stable").tolist():
        bucket = length_bucket(prompts[index].size)
        if runs and (runs[-1][0] == bucket or len(runs[-1][1]) < fill):
            runs[-1] = (bucket, [*runs[-1][1], index])
        else:
            runs.append((bucket, [index]))
    return runs

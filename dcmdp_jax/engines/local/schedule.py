"""Scheduling of rows into batches, which are refilled and whose caches grow with their rows."""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.engines.local import decode, layout
from dcmdp_jax.engines.local.cache import Cache, insert, slots_of, take
from dcmdp_jax.engines.local.sizes import (
    PREEMPTED_CACHES,
    BatchSizes,
    padded_rows,
    prefill_shape,
    round_up,
)
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.models import sampler
from dcmdp_jax.types import Params

_REFILL = 4
"""A batch is refilled when one in this many of its places is free."""
_STEPS_OF_A_MOVE = 8
"""A move to half the rows takes about as long as half of this many steps; with fewer left before
the next one, which halves the rows as well, it saves nothing.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallPlan:
    """Plan for sampling the rows of a call.

    Attributes:
        mode, draw: the distribution, see `sampler.choose_tokens`.
        sizes: batch shapes.
        group: rows of a prompt.
        buckets: cache slots of a prompt, and the prompts of the call that are no longer.
    """

    mode: str
    draw: sampler.Draw
    sizes: BatchSizes
    group: int
    buckets: list[tuple[int, list[int]]]


class Completions:
    """The completions of one call of `generate`, indexed by row of the whole call.

    Attributes:
        prompts, group: prompts of the call, and rows of each.
        tokens, logprobs: [N, limit] int32 and float32; undefined from `sampled` on.
        sampled: [N] int32.
        keys: [N, 2] uint32, see `sampler.row_keys`, from row `first_row` on.
        prompt_lengths: [N] int32.
        routed_experts: [N, limit, layers, k] int16, of the tokens that were read, all but a row's
            last; None if no one asked.
        prompt_routed_experts: the same of each prompt, [P, layers, k].
        top: columns of the top-k tokens, [N, limit, k] each; empty if no one asked.
        columns: `tokens`, `logprobs` and those of `top`, as `sampler.choose_tokens` returns them.
        slot_tokens: [N, limit] int32, the token that each cache slot after the prompt holds; see
            `decode.RowState`.
        finished: rows that ended since `take_finished`.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        plan: CallPlan,
        program: layout.Program,
        seed: int,
        step: int,
        *,
        first_row: int,
    ) -> None:
        self.prompts = prompts
        self.group = plan.group
        self.finished: list[int] = []
        count = len(prompts) * plan.group
        limit = plan.sizes.limit
        self.tokens = np.empty((count, limit), np.int32)
        self.logprobs = np.empty((count, limit), np.float32)
        self.sampled = np.zeros(count, np.int32)
        self.slot_tokens = np.zeros((count, limit), np.int32)
        rows = first_row + np.arange(count, dtype=np.uint32)
        self.keys = np.asarray(sampler.row_keys(np.uint32(seed), np.uint32(step), rows))
        lengths = np.asarray([prompt.size for prompt in prompts], np.int32)
        self.prompt_lengths = np.repeat(lengths, plan.group)

        self.routed_experts: np.ndarray | None = None
        if program.routed_experts:
            shape = (count, limit, *program.config.routing[:2])
            self.routed_experts = np.empty(shape, np.int16)
        self.prompt_routed_experts: dict[int, np.ndarray] = {}
        self.top: dict[str, np.ndarray] = {}
        top = program.listed(plan.mode)
        if top:
            self.top[TOP_IDS] = np.empty((count, limit, top), np.int32)
            self.top[TOP_LOGPROBS] = np.empty((count, limit, top), np.float32)
        self.columns = (self.tokens, self.logprobs, *self.top.values())

    def add(
        self,
        rows: np.ndarray,
        columns: Sequence[np.ndarray],
        sampled: np.ndarray,
        routed: np.ndarray | None = None,
    ) -> None:
        """Append tokens.

        Args:
            rows: rows of the call.
            columns: entries of `columns`, [steps, rows, ...] each; undefined beyond `sampled`.
            sampled: each row's new length.
            routed: experts of the tokens before them.
        """
        steps = np.arange(len(columns[0]))
        places = self.sampled[rows] + steps[:, None]
        if routed is not None:
            self.routed_experts[rows, places - 1] = routed
        for column, values in zip(self.columns, columns, strict=True):
            column[rows, places] = values
        self.sampled[rows] = sampled

    def columns_of(self, row: int) -> dict[str, np.ndarray]:
        """The further columns of a row that were asked for.

        The experts of its prompt and its completion without the last token, [P + C - 1, layers, k],
        and the top-k tokens of its completion, [C, k].
        """
        count = self.sampled[row]
        columns = {name: values[row, :count] for name, values in self.top.items()}
        if self.routed_experts is not None:
            prompt_experts = self.prompt_routed_experts[row // self.group]
            experts = self.routed_experts[row, : count - 1]
            columns["routed_experts"] = np.concatenate([prompt_experts, experts])
        return columns

    def take_finished(self) -> list[int]:
        """Return the rows that finished since the last call."""
        finished = self.finished
        self.finished = []
        return finished


@dataclasses.dataclass(eq=False)
class _QueuedCache:
    """A cache, the first `used` rows of which were queued for a batch."""

    cache: Cache
    used: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QueuedRow:
    """A row of the call that waits for a batch, and where its cache is."""

    row: int
    source: _QueuedCache
    position: int


@dataclasses.dataclass(eq=False, kw_only=True)
class _Batch:
    """A batch that is decoded.

    Attributes:
        level: see `Scheduler`.
        rows: [R], the row of the call in each place, -1 where it is free.
        cache: cache of R rows.
        prefix: cache slots of the prompt and of the tokens sampled before the window.
        clock: steps taken in the window, see `decode.decode`.
    """

    level: int
    rows: np.ndarray
    cache: Cache
    prefix: int
    clock: int = 0

    @property
    def live(self) -> np.ndarray:
        """Places that are not free."""
        return np.flatnonzero(self.rows >= 0)


class Scheduler:
    """Sample rows whose prompts share a bucket.

    New rows enter a batch as others finish. Each batch has a level: at level k its cache holds
    min(2^k cache_block, limit) completion tokens, and a row that fills its cache is preempted and
    queued for the next level. So batches stay full, a few long rows do not lengthen the cache of
    the others, and the longest rows run together at the end.

    Preempted rows use at most as much memory as the caches of two full batches of the longest rows.
    """

    def __init__(
        self,
        weights: Params,
        completions: Completions,
        plan: CallPlan,
        members: Sequence[int],
        bucket: int,
        *,
        program: layout.Program,
        trims: bool = False,
    ) -> None:
        """Store the arguments.

        Args:
            weights: the engine's tree.
            completions: completions of the call; the rows of `members` are filled.
            plan: the distribution and batch shapes.
            members: prompts of the call, none longer than `bucket`.
            bucket: cache slots of a prompt.
            program: static arguments of the programs.
            trims: memory of a cache that is done with returns to the system, so that the heap of
                another device's thread can have it.
        """
        self._weights = weights
        self._completions = completions
        self._draw = plan.draw
        self._mode = plan.mode
        self._sizes = plan.sizes
        self._members = deque(members)
        self._bucket = bucket
        self._program = program
        self._trims = trims
        self._unit = round_up(max(1, plan.sizes.rows // _REFILL), plan.sizes.devices)
        self._capacities = plan.sizes.capacities
        self._queues: list[deque[_QueuedRow]] = [deque() for _ in self._capacities]

    def sample(self) -> Iterator[None]:
        """Sample all rows of the prompts. Pauses whenever rows may have finished."""
        while levels := [level for level in range(len(self._queues)) if self._has(level)]:
            level = levels[0]
            if self._blocked(level):
                level = levels[-1]
            yield from self._run(level)

    def _has(self, level: int) -> bool:
        return bool(self._queues[level]) or (level == 0 and bool(self._members))

    def _blocked(self, level: int) -> bool:
        """Whether preempted rows use too much memory for new rows to enter this level."""
        if level == len(self._queues) - 1:
            return False
        sources = {queued.source for queued in itertools.chain(*self._queues[1:])}
        preempted = sum(slots_of(source.cache) for source in sources)
        # The rows of the running batch may come on top.
        return preempted > (PREEMPTED_CACHES - 1) * (self._bucket + self._sizes.limit)

    def _run(self, level: int) -> Iterator[None]:
        """Run a batch, refilling it, until all its rows are done or preempted."""
        queued = self._supply(level, self._sizes.rows)
        if not queued:
            return
        batch = self._new_batch(level, queued)
        while True:
            refills = self._refill(batch)
            if not batch.live.size:
                if refills:
                    continue
                return

            if not refills:
                self._shrink(batch)
            self._decode(batch, refills)
            yield

            live = batch.live
            lengths = self._completions.sampled[batch.rows[live]]
            full = live[lengths > self._capacities[batch.level]]
            if not full.size:
                continue
            all_full = full.size == live.size
            if all_full and self._keeps_together(batch.level, full.size, refills):
                self._move_up(batch)
            else:
                self._preempt(batch, full)

    def _supply(self, level: int, count: int) -> list[_QueuedRow]:
        """Return at most `count` rows that can enter this level."""
        queue = self._queues[level]
        while level == 0 and len(queue) < count and self._members:
            self._prefill()
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def _prefill(self) -> None:
        """Run the next prompts and sample the first token of each of their rows."""
        completions = self._completions
        group = completions.group
        size = self._sizes.rows
        count = max(1, size // group)
        members = [self._members.popleft() for _ in range(min(count, len(self._members)))]
        prompts, chunks = prefill_shape(
            self._program.config.num_heads,
            count,
            self._bucket,
            self._sizes.devices,
        )
        padded, lengths = padded_rows(
            [completions.prompts[index] for index in members], prompts, self._bucket
        )
        cache, hidden, routed = decode.prefill(
            self._weights,
            padded,
            lengths,
            program=self._program,
            groups=chunks,
        )
        if routed is not None:
            for index, experts, length in zip(members, np.asarray(routed), lengths, strict=False):
                completions.prompt_routed_experts[index] = experts[:length]

        source = _QueuedCache(cache, len(members))
        rows = (np.asarray(members)[:, None] * group + np.arange(group)).reshape(-1)
        positions = np.repeat(np.arange(len(members), dtype=np.int32), group)
        for start in range(0, rows.size, size):
            chunk = slice(start, start + size)
            self._sample_first(source, hidden, rows[chunk], positions[chunk])

    def _sample_first(
        self,
        source: _QueuedCache,
        hidden: jax.Array,
        rows: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        """Sample first tokens and queue the rows that go on.

        Args:
            source: cache of prompts.
            hidden: [P, D], see `decode.prefill`.
            rows: rows of the call, no more than a batch has.
            positions: index of each row's prompt.
        """
        size = self._sizes.rows
        columns = jax.device_get(
            decode.first_tokens(
                self._weights,
                hidden,
                np.resize(positions, size),
                self._completions.keys[np.resize(rows, size)],
                self._draw,
                program=self._program,
                mode=self._mode,
            )
        )
        count = rows.size
        one_step = [values[None, :count] for values in columns]
        self._completions.add(
            rows,
            one_step,
            np.ones(count, np.int32),
        )
        first = self._completions.tokens[rows, 0]
        ended = np.isin(first, self._draw.stop_ids) | (self._sizes.limit == 1)
        self._completions.finished += rows[ended].tolist()
        for row, position in zip(rows[~ended].tolist(), positions[~ended].tolist(), strict=True):
            self._queues[0].append(_QueuedRow(row=row, source=source, position=position))

    def _new_batch(self, level: int, queued: Sequence[_QueuedRow]) -> _Batch:
        """A batch of the rows."""
        source = queued[0].source
        first = [row for row in queued if row.source is source]
        cache, rows = self._take(
            source.cache,
            np.array([row.position for row in first]),
            np.array([row.row for row in first]),
            size=self._sizes.shrunk(self._sizes.rows, len(queued)),
            slots=self._bucket + self._capacities[level],
            # Other queued rows may still use this cache.
            release=False,
        )
        batch = _Batch(level=level, rows=rows, cache=cache, prefix=slots_of(source.cache))
        self._enter(batch, queued[len(first) :])
        return batch

    def _refill(self, batch: _Batch) -> bool:
        """Fill the free places if they are enough; return whether more rows could enter."""
        free = int((batch.rows < 0).sum())
        if self._has_refill(batch.level) and (free >= self._unit or free == batch.rows.size):
            self._enter(batch, self._supply(batch.level, free))
        return self._has_refill(batch.level)

    def _has_refill(self, level: int) -> bool:
        return self._has(level) and not self._blocked(level)

    def _enter(self, batch: _Batch, queued: Sequence[_QueuedRow]) -> None:
        """Insert rows into free places of the batch."""
        for source, group in itertools.groupby(queued, lambda row: row.source):
            rows = list(group)
            free = np.flatnonzero(batch.rows < 0)
            places = free[: len(rows)]
            batch.rows[places] = [row.row for row in rows]
            positions = [row.position for row in rows]
            batch.cache = self._insert(batch.cache, source.cache, positions, places)

    def _shrink(self, batch: _Batch) -> None:
        """Move the live rows to a smaller batch if they fit one and enough steps are left."""
        size = self._sizes.shrunk(batch.rows.size, batch.live.size)
        if size < batch.rows.size and self._steps_left(batch) > _STEPS_OF_A_MOVE:
            self._move(batch, size, slots_of(batch.cache))

    def _move(self, batch: _Batch, size: int, slots: int) -> None:
        """Move the live rows to a cache of `size` rows, with `slots` slots each."""
        live = batch.live
        batch.cache, batch.rows = self._take(
            batch.cache,
            live,
            batch.rows[live],
            size=size,
            slots=slots,
        )

    def _steps_left(self, batch: _Batch) -> int:
        """Steps until a row fills its cache or ends."""
        longest = int(self._completions.sampled[batch.rows[batch.live]].max())
        return min(self._capacities[batch.level] + 1, self._sizes.limit) - longest

    def _decode(self, batch: _Batch, refills: bool) -> None:
        """Decode until rows should leave the batch; finished rows leave it.

        Args:
            batch: is changed.
            refills: rows wait for free places.
        """
        completions = self._completions
        live = batch.live
        rows = batch.rows[live]
        # A free place is -1 and reads the last row; `done` keeps it out of everything.
        sampled = completions.sampled[batch.rows]
        slot_tokens = None
        if self._program.config.sliding_window:
            slot_tokens = completions.slot_tokens[batch.rows, : batch.prefix - self._bucket]
        state = decode.RowState(
            keys=completions.keys[batch.rows],
            prompt_lengths=completions.prompt_lengths[batch.rows],
            last=completions.tokens[batch.rows, sampled - 1],
            sampled=sampled,
            done=batch.rows < 0,
            slot_tokens=slot_tokens,
        )
        limits = decode.Limits(
            clock=np.int32(batch.clock),
            steps=np.int32(self._steps_left(batch)),
            live_floor=np.int32(self._live_floor(batch, refills)),
        )
        batch.cache, decoded = decode.decode(
            self._weights,
            batch.cache,
            state,
            limits,
            self._draw,
            program=self._program,
            slot_layout=decode.SlotLayout(
                prompt_slots=self._bucket,
                prefix_slots=batch.prefix,
            ),
            mode=self._mode,
        )

        decoded = jax.device_get(decoded)
        steps = np.arange(int(decoded.steps))
        window = slots_of(batch.cache) - batch.prefix
        # Step i read the token before the one it sampled, and wrote it into the circular window.
        window_slots = (batch.clock + steps) % window
        slots_after_prompt = batch.prefix - self._bucket + window_slots
        tokens_read = sampled[live][:, None] - 1 + steps
        completions.slot_tokens[rows[:, None], slots_after_prompt] = tokens_read
        batch.clock += steps.size
        taken_steps = (slice(steps.size), live)
        columns, routed = jax.tree.map(
            lambda values: values[taken_steps], (decoded.columns, decoded.routed_experts)
        )
        completions.add(
            rows,
            columns,
            decoded.sampled[live],
            routed,
        )
        ended = decoded.done[live] | (completions.sampled[rows] == self._sizes.limit)
        batch.rows[live[ended]] = -1
        completions.finished += rows[ended].tolist()

    def _live_floor(self, batch: _Batch, refills: bool) -> int:
        """Live rows at which a refill is due, or else a move to half the rows; 0 for neither."""
        if refills:
            return batch.rows.size - self._unit
        half = self._sizes.half(batch.rows.size)
        if self._sizes.min_rows <= half < batch.live.size:
            return half
        return 0

    def _keeps_together(self, level: int, count: int, refills: bool) -> bool:
        """Whether a batch of full rows moves up whole.

        It does where there are none to wait for, or too many to copy twice.
        """
        return count >= 0.75 * self._sizes.rows or not (refills or self._queues[level + 1])

    def _move_up(self, batch: _Batch) -> None:
        """Give all live rows the cache of the next level."""
        size = self._sizes.shrunk(batch.rows.size, batch.live.size)
        batch.level += 1
        batch.clock = 0
        batch.prefix = slots_of(batch.cache)
        slots = self._bucket + self._capacities[batch.level]
        if size < batch.rows.size:
            self._move(batch, size, slots)
        else:
            longer = take(
                batch.cache,
                None,
                extra=slots - batch.prefix,
                sharding=self._program.cache,
                release=True,
            )
            batch.cache = self._trimmed(longer)

    def _preempt(self, batch: _Batch, full: np.ndarray) -> None:
        """Move the rows of full places to a queued cache, for the next level."""
        queue = self._queues[batch.level + 1]
        size = self._sizes.rows
        while full.size:
            target = None
            if queue:
                target = queue[-1].source
            if target is None or target.used == size:
                places = full[:size]
                repeated = np.resize(places.astype(np.int32), size)
                cache = take(batch.cache, repeated, extra=0, sharding=self._program.cache)
                target = _QueuedCache(cache, 0)
            else:
                places = full[: size - target.used]
                positions = target.used + np.arange(places.size)
                target.cache = self._insert(target.cache, batch.cache, places, positions)
            for row in batch.rows[places].tolist():
                queue.append(_QueuedRow(row=row, source=target, position=target.used))
                target.used += 1
            batch.rows[places] = -1
            full = full[places.size :]

    def _take(
        self,
        cache: Cache,
        positions: np.ndarray,
        rows: np.ndarray,
        *,
        size: int,
        slots: int,
        release: bool = True,
    ) -> tuple[Cache, np.ndarray]:
        """Copy rows of a cache to a new one.

        Rows stay on their devices if there is room, else they are placed in order.

        Args:
            cache: the old cache.
            positions: where the rows are in it.
            rows: what rows of the call they are.
            size, slots: rows of the new cache, and token slots of each.
            release: free the old cache.

        Returns:
            The new cache, and the row of the call in each of its rows, -1 for none.
        """
        devices = self._program.row_shards
        device_rows = cache[0][0].shape[0] // devices
        room = size // devices
        owners = positions // device_rows
        local = devices > 1 and bool(np.bincount(owners).max() <= room)
        places = np.arange(rows.size)
        if local:
            for device in range(devices):
                on_device = np.flatnonzero(owners == device)
                places[on_device] = device * room + np.arange(on_device.size)
            positions = positions % device_rows

        # The content of empty places is unused.
        sources = np.zeros(size, np.int32)
        sources[places] = positions
        new_rows = np.full(size, -1)
        new_rows[places] = rows
        taken_cache = take(
            cache,
            sources,
            extra=slots - slots_of(cache),
            sharding=self._program.cache,
            local=local,
            release=release,
        )
        return self._trimmed(taken_cache), new_rows

    def _trimmed(self, cache: Cache) -> Cache:
        """Return a cache once the memory of its predecessor has gone back to the system."""
        if self._trims:
            jax.block_until_ready(cache)
            release_freed_memory()
        return cache

    def _insert(
        self,
        cache: Cache,
        source: Cache,
        rows: Sequence[int],
        places: Sequence[int],
    ) -> Cache:
        """Copy `rows` of another cache into `places` of this one, `_unit` at a time."""
        for start in range(0, len(rows), self._unit):
            copied = np.asarray(rows[start : start + self._unit], np.int32)
            targets = np.full(self._unit, np.iinfo(np.int32).max, np.int32)
            targets[: copied.size] = places[start : start + self._unit]
            repeated = np.resize(copied, self._unit)
            cache = insert(cache, source, repeated, targets, sharding=self._program.cache)
        # Wait: see `parallel.backend.MAX_IN_FLIGHT_PROGRAMS`.
        return jax.block_until_ready(cache)

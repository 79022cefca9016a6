"""Scheduling of rows into batches: batches are refilled, and caches grow only as long as their rows
need.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS
from dcmdp_jax.engines.local import decode as programs
from dcmdp_jax.engines.local import layout
from dcmdp_jax.engines.local.cache import Cache, insert, slots_of, take
from dcmdp_jax.engines.local.sizes import (
    PREEMPTED_CACHES,
    cache_capacities,
    prefill_shape,
    round_up,
)
from dcmdp_jax.engines.process_memory import release_freed_memory
from dcmdp_jax.models import sampler
from dcmdp_jax.types import Params

_REFILL = 4
"""A batch is refilled when one in this many of its slots is free."""
_STEPS_OF_A_MOVE = 8
"""A move to half the rows takes about as long as half of this many steps; with fewer left before
the next one, which halves the rows as well, it saves nothing.
"""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Batch shapes.

    Attributes:
        rows: rows of a full batch; a multiple of the number of devices.
        min_rows: batches do not shrink below this.
        cache_block: completion slots in the cache of new rows. The cache doubles as rows grow; if
            the first doubling would reach `limit`, it has `limit` slots from the start.
        limit: max tokens of a completion.
    """

    rows: int
    min_rows: int
    cache_block: int
    limit: int


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
        top: ids and log-probs of the likeliest tokens, [N, limit, k] each; () if no one asked.
        held: [N, limit] int32, the token that each cache slot after the prompt holds; see
            `decode.RowState`.
        finished: rows that ended since `take_finished`.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        group: int,
        limit: int,
        seed: int,
        step: int,
        *,
        first_row: int,
        routed_shape: tuple[int, int] | None = None,
        top: int = 0,
    ) -> None:
        self.finished: list[int] = []
        count = len(prompts) * group
        self.tokens = np.empty((count, limit), np.int32)
        self.logprobs = np.empty((count, limit), np.float32)
        self.sampled = np.zeros(count, np.int32)
        self.held = np.zeros((count, limit), np.int32)
        rows = first_row + np.arange(count, dtype=np.uint32)
        self.keys = np.asarray(sampler.row_keys(np.uint32(seed), np.uint32(step), rows))
        self.prompt_lengths = np.repeat(
            np.asarray([prompt.size for prompt in prompts], np.int32), group
        )
        self.routed_experts = (
            None if routed_shape is None else np.empty((count, limit, *routed_shape), np.int16)
        )
        self.prompt_routed_experts: dict[int, np.ndarray] = {}
        self.top = tuple(
            np.empty((count, limit, top), dtype) for dtype in (np.int32, np.float32) if top
        )
        self.prompts = prompts
        self.group = group

    def add(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        logprobs: np.ndarray,
        sampled: np.ndarray,
        routed: np.ndarray | None = None,
        top: Sequence[np.ndarray] = (),
    ) -> None:
        """Append [steps, rows] tokens; `sampled` is each row's new length, tokens beyond it are
        undefined.

        `routed` are the experts of the tokens before them, `top` the likeliest tokens in their
        places.
        """
        places = self.sampled[rows][:, None] + np.arange(tokens.shape[0])
        self.tokens[rows[:, None], places] = tokens.T
        self.logprobs[rows[:, None], places] = logprobs.T
        if routed is not None:
            self.routed_experts[rows[:, None], places - 1] = routed.swapaxes(0, 1)
        for whole, values in zip(self.top, top, strict=True):
            whole[rows[:, None], places] = values.swapaxes(0, 1)
        self.sampled[rows] = sampled

    def columns_of(self, row: int) -> dict[str, np.ndarray]:
        """The further columns of a row that were asked for.

        The experts of its prompt and its completion without the last token, [P + C - 1, layers, k],
        and the likeliest tokens of its completion, [C, k].
        """
        columns = {}
        count = self.sampled[row]
        if self.routed_experts is not None:
            parts = [
                self.prompt_routed_experts[row // self.group],
                self.routed_experts[row, : count - 1],
            ]
            columns["routed_experts"] = np.concatenate(parts)
        lists = zip((TOP_IDS, TOP_LOGPROBS), self.top, strict=False)
        return columns | {name: whole[row, :count] for name, whole in lists}

    def take_finished(self) -> list[int]:
        """Return the rows that finished since the last call."""
        finished = self.finished
        self.finished = []
        return finished


@dataclasses.dataclass(eq=False)
class _QueuedCache:
    """A cache whose rows are queued for a batch."""

    cache: Cache
    used: int


class _Waiting(NamedTuple):
    """A queued row of the call, and the location of its cache."""

    kept: _QueuedCache
    place: int
    row: int


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
        draw: sampler.Draw,
        mode: str,
        sizes: Sizes,
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
            draw, mode: the distribution.
            sizes: batch shapes.
            members: prompts of the call, none longer than `bucket`.
            bucket: cache slots of a prompt.
            program: static arguments of the programs.
            trims: memory of a cache that is done with returns to the system, so that the heap of
                another device's thread can have it.
        """
        self._weights = weights
        self._completions = completions
        self._draw = draw
        self._mode = mode
        self._sizes = sizes
        self._program = program
        self._devices = program.mesh.size
        self._trims = trims
        self._unit = round_up(max(1, sizes.rows // _REFILL), self._devices)
        self._capacities = cache_capacities(sizes.cache_block, sizes.limit)
        self._members = deque(members)
        self._bucket = bucket
        self._slots = [bucket + capacity for capacity in self._capacities]
        self._queues: list[deque[_Waiting]] = [deque() for _ in self._capacities]

    def sample(self) -> Iterator[None]:
        """Sample all rows of the prompts. Pauses whenever rows may have finished."""
        while any(self._has(level) for level in range(len(self._queues))):
            levels = [level for level in range(len(self._queues)) if self._has(level)]
            yield from self._run(levels[-1] if self._blocked(levels[0]) else levels[0])

    def shapes(self) -> list[tuple[int, int, int]]:
        """Rows, cache slots and prefix slots of all batches that prompts of the bucket can come
        to.
        """
        sizes = [self._sizes.rows]
        while (half := self._shrunk(sizes[-1], -(-sizes[-1] // 2))) < sizes[-1]:
            sizes.append(half)
        pairs = itertools.pairwise([self._bucket, *self._slots])
        return [(rows, *pair[::-1]) for pair in pairs for rows in sizes]

    def _has(self, level: int) -> bool:
        return bool(self._queues[level]) or (level == 0 and bool(self._members))

    def _blocked(self, level: int) -> bool:
        """Return whether the preempted rows use too much memory for new rows to enter this
        level.
        """
        if level == len(self._queues) - 1:
            return False
        aside = {id(row.kept): row.kept for queue in self._queues[1:] for row in queue}
        # The rows of the running batch may come on top.
        most = (PREEMPTED_CACHES - 1) * (self._bucket + self._sizes.limit)
        return sum(slots_of(kept.cache) for kept in aside.values()) > most

    def _run(self, level: int) -> Iterator[None]:
        """Run a batch, refilling it, until all its rows are done or preempted."""
        completions = self._completions
        sizes = self._sizes
        waiting = self._supply(level, sizes.rows)
        if not waiting:
            return
        first = [row for row in waiting if row.kept is waiting[0].kept]
        size = self._shrunk(sizes.rows, len(waiting))
        source = first[0].kept.cache
        # Other queued rows may still use this cache.
        cache, order = self._take(
            source, [row.place for row in first], size, self._slots[level], release=False
        )
        places = _ordered([row.row for row in first], order)
        cache = self._enter(cache, places, waiting[len(first) :])
        clock = 0
        prefix = slots_of(first[0].kept.cache)
        while True:
            more = self._has(level) and not self._blocked(level)
            free = int((places < 0).sum())
            if more and (free >= self._unit or free == places.size):
                cache = self._enter(cache, places, self._supply(level, free))
                more = self._has(level) and not self._blocked(level)
            live = np.flatnonzero(places >= 0)
            if not live.size:
                if more:
                    continue
                return
            pays = self._steps_left(level, places[live]) > _STEPS_OF_A_MOVE
            if (
                pays
                and not more
                and (smaller := self._shrunk(places.size, live.size)) < places.size
            ):
                cache, order = self._take(cache, live, smaller, slots_of(cache))
                places = _ordered(places[live], order)
                live = np.flatnonzero(places >= 0)
            cache, steps = self._decode(cache, places, live, level, clock, prefix, more)
            clock += steps
            yield
            full = np.flatnonzero(
                (places >= 0) & (completions.sampled[places] > self._capacities[level])
            )
            if not full.size:
                continue
            if full.size == (places >= 0).sum() and self._keeps_together(level, full.size, more):
                prefix = slots_of(cache)
                size = self._shrunk(places.size, full.size)
                level = level + 1
                clock = 0
                if size == places.size:
                    extra = self._slots[level] - prefix
                    cache = self._trimmed(
                        take(cache, None, extra=extra, sharding=self._program.cache, release=True)
                    )
                else:
                    cache, order = self._take(cache, full, size, self._slots[level])
                    places = _ordered(places[full], order)
            else:
                self._preempt(cache, places, full, level + 1)

    def _decode(
        self,
        cache: Cache,
        places: np.ndarray,
        live: np.ndarray,
        level: int,
        clock: int,
        prefix: int,
        more: bool,
    ) -> tuple[Cache, int]:
        """Decode until rows should leave the batch; finished rows are removed from `places`."""
        completions = self._completions
        sampled = completions.sampled[places]
        rows = programs.RowState(
            keys=completions.keys[places],
            prompt_lengths=completions.prompt_lengths[places],
            last=completions.tokens[places, sampled - 1],
            sampled=sampled,
            done=places < 0,
            held=completions.held[places, : prefix - self._bucket]
            if self._program.config.sliding_window
            else None,
        )
        half = round_up(-(-places.size // 2), self._devices)
        shrinkable = self._sizes.min_rows <= half < min(places.size, live.size)
        floor = places.size - self._unit if more else half if shrinkable else 0
        steps = np.int32(self._steps_left(level, places[live]))
        cache, decoded = programs.decode(
            self._weights,
            cache,
            rows,
            programs.Limits(np.int32(clock), steps, np.int32(floor)),
            self._draw,
            program=self._program,
            prompt_slots=self._bucket,
            prefix_slots=prefix,
            mode=self._mode,
        )
        decoded = jax.device_get(decoded)
        steps = int(decoded.steps)
        of = places[live]
        written = prefix - self._bucket + (clock + np.arange(steps)) % (slots_of(cache) - prefix)
        completions.held[of[:, None], written] = sampled[live][:, None] - 1 + np.arange(steps)
        routed = None if decoded.routed_experts is None else decoded.routed_experts[:steps, live]
        tokens, logprobs, *top = (
            x[:steps, live] for x in (decoded.tokens, decoded.logprobs, *decoded.top)
        )
        completions.add(of, tokens, logprobs, decoded.sampled[live], routed, top)
        ended = decoded.done[live] | (completions.sampled[of] == self._sizes.limit)
        places[live] = np.where(ended, -1, of)
        completions.finished += of[ended].tolist()
        return cache, steps

    def _steps_left(self, level: int, rows: np.ndarray) -> int:
        """Steps until one of these rows fills its cache or ends."""
        return min(self._capacities[level] + 1, self._sizes.limit) - int(
            self._completions.sampled[rows].max()
        )

    def _keeps_together(self, level: int, count: int, more: bool) -> bool:
        """Return whether a batch of full rows moves up whole: none to wait for, or too many to copy
        twice.
        """
        return count >= 0.75 * self._sizes.rows or not (more or self._queues[level + 1])

    def _supply(self, level: int, count: int) -> list[_Waiting]:
        """Return at most `count` rows that can enter this level."""
        queue = self._queues[level]
        while level == 0 and len(queue) < count and self._members:
            self._prefill()
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    def _prefill(self) -> None:
        """Run the next prompts and sample the first token of each of their rows."""
        program = self._program
        completions = self._completions
        draw = self._draw
        group = completions.group
        count = max(1, self._sizes.rows // group)
        members = [self._members.popleft() for _ in range(min(count, len(self._members)))]
        prompts, groups = prefill_shape(
            program.config.num_heads, count, self._bucket, self._devices
        )
        padded = np.zeros((prompts, self._bucket), np.int32)
        lengths = np.ones(padded.shape[0], np.int32)
        for place, index in enumerate(members):
            padded[place, : completions.prompts[index].size] = completions.prompts[index]
            lengths[place] = completions.prompts[index].size
        cache, hidden, routed = programs.prefill(
            self._weights, padded, lengths, program=program, groups=groups
        )
        if routed is not None:
            routed = np.asarray(routed)
            for place, index in enumerate(members):
                completions.prompt_routed_experts[index] = routed[place, : lengths[place]]
        rows = (np.asarray(members)[:, None] * group + np.arange(group)).reshape(-1)
        of = np.repeat(np.arange(len(members), dtype=np.int32), group)
        kept = _QueuedCache(cache, len(members))
        for start in range(0, rows.size, self._sizes.rows):
            part = rows[start : start + self._sizes.rows]
            prompts = of[start : start + self._sizes.rows]
            tokens, logprobs, top = jax.device_get(
                programs.first_tokens(
                    self._weights,
                    hidden,
                    np.resize(prompts, self._sizes.rows),
                    completions.keys[np.resize(part, self._sizes.rows)],
                    draw,
                    program=program,
                    mode=self._mode,
                )
            )
            tokens = tokens[: part.size]
            logprobs = logprobs[: part.size]
            top = [values[None, : part.size] for values in top]
            completions.add(
                part, tokens[None], logprobs[None], np.ones(part.size, np.int32), top=top
            )
            going = ~np.isin(tokens, draw.stop_ids) & (self._sizes.limit > 1)
            completions.finished += part[~going].tolist()
            pairs = zip(prompts[going].tolist(), part[going].tolist(), strict=True)
            self._queues[0].extend(_Waiting(kept, place, row) for place, row in pairs)

    def _enter(self, cache: Cache, places: np.ndarray, waiting: Sequence[_Waiting]) -> Cache:
        """Insert rows into free slots of the batch."""
        free = iter(np.flatnonzero(places < 0).tolist())
        for _, rows in itertools.groupby(waiting, lambda row: id(row.kept)):
            rows = list(rows)
            to = list(itertools.islice(free, len(rows)))
            places[to] = [row.row for row in rows]
            cache = self._insert(cache, rows[0].kept.cache, [row.place for row in rows], to)
        return cache

    def _preempt(self, cache: Cache, places: np.ndarray, full: np.ndarray, level: int) -> None:
        """Preempt rows of a batch and queue them for `level`."""
        queue = self._queues[level]
        size = self._sizes.rows
        while full.size:
            kept = queue[-1].kept if queue else None
            if kept is None or kept.used == size:
                part = full[:size]
                full = full[size:]
                filled = np.resize(np.asarray(part, np.int32), size)
                kept = _QueuedCache(take(cache, filled, extra=0, sharding=self._program.cache), 0)
            else:
                part = full[: size - kept.used]
                full = full[size - kept.used :]
                kept.cache = self._insert(kept.cache, cache, part, kept.used + np.arange(part.size))
            queue.extend(
                _Waiting(kept, kept.used + i, row) for i, row in enumerate(places[part].tolist())
            )
            kept.used += part.size
            places[part] = -1

    def _take(
        self, cache: Cache, rows: Sequence[int], size: int, slots: int, *, release: bool = True
    ) -> tuple[Cache, np.ndarray]:
        """Copy `rows` to a new cache of `size` rows; also return which of `rows` is in each slot,
        -1 for none.

        Frees the old cache if `release`. Rows stay on their devices if there is room, else they are
        placed in order.
        """
        rows = np.asarray(rows, np.int32)
        devices = self._program.row_shards
        share = cache[0][0].shape[0] // devices
        room = size // devices
        owners = rows // share
        local = devices > 1 and np.bincount(owners).max() <= room
        order = np.full((devices, room), -1)
        if local:
            for device in range(devices):
                own = np.flatnonzero(owners == device)
                order[device, : own.size] = own
        else:
            order.reshape(-1)[: rows.size] = np.arange(rows.size)
        order = order.reshape(-1)
        # The content of empty slots is unused.
        named = np.where(order >= 0, rows[order] % share if local else rows[order], 0)
        how = {"sharding": self._program.cache, "local": bool(local), "release": release}
        return self._trimmed(take(cache, named, extra=slots - slots_of(cache), **how)), order

    def _trimmed(self, cache: Cache) -> Cache:
        """Return a cache after the memory of the one that it was taken from has gone back to the
        system.
        """
        if self._trims:
            jax.block_until_ready(cache)
            release_freed_memory()
        return cache

    def _insert(
        self, cache: Cache, source: Cache, rows: Sequence[int], places: Sequence[int]
    ) -> Cache:
        for start in range(0, len(rows), self._unit):
            part = np.asarray(rows[start : start + self._unit], np.int32)
            to = np.full(self._unit, np.iinfo(np.int32).max, np.int32)
            to[: part.size] = places[start : start + self._unit]
            cache = insert(
                cache, source, np.resize(part, self._unit), to, sharding=self._program.cache
            )
        # Wait: see `parallel.backend.MAX_IN_FLIGHT_PROGRAMS`.
        return jax.block_until_ready(cache)

    def _shrunk(self, size: int, live: int) -> int:
        """Halve the row count while the live rows fit and it stays at or above `min_rows`."""
        while (half := round_up(-(-size // 2), self._devices)) < size and half >= max(
            live, self._sizes.min_rows
        ):
            size = half
        return size


def _ordered(rows: Sequence[int], order: np.ndarray) -> np.ndarray:
    """Return `rows[order]`, -1 where `order` is -1."""
    return np.where(order >= 0, np.asarray(rows)[order], -1)

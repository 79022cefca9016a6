"""The embedded inference engine: samples completions in JAX, in the trainer's own process."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.decoder import check_params
from dcmdp_jax.rollout.checks import check_finite, checked_sequences, scored_rows
from dcmdp_jax.rollout.engine import EngineError, SamplingParams
from dcmdp_jax.rollout.local import decode
from dcmdp_jax.rollout.local.weights import PRECISIONS, convert, fingerprint, source_fingerprint
from dcmdp_jax.types import Params, Rollout

logger = logging.getLogger(__name__)

_SMALLEST_BUCKET = 16
_ATTENTION_ELEMENTS = 2**28
"""Attention scores that a forward pass over whole rows may hold at one time: 1 GiB in float32."""


class LocalEngine:
    """Keeps the `Engine` protocol with compiled JAX programs.

    Sampling is a function of (seed, step, row): the random words of token t of a row come from
    fold_in(fold_in(fold_in(key(seed), step), row), t) whatever batch, bucket or chunk the row is computed in. Only the
    rounding of products depends on the batch, about 1e-6 in a float32 log-prob.

    Each prompt is run once; its cache is copied to the rows that answer it. Rows advance in lockstep; when half of them
    are done the others move to a batch of half the size, and the cache grows by doubling, so that a long completion
    costs little while it is short. Each new shape compiles once: prompt bucket x row count x cache length.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        precision: str = "exact",
        compute_dtype: str = "float32",
        kv_cache_dtype: str = "auto",
        max_total_tokens: int,
        prompt_buckets: Sequence[int] = (),
        max_rows: int = 256,
        min_rows: int = 32,
        cache_block: int = 128,
        mesh: Mesh | None = None,
    ) -> None:
        """Checks the settings; nothing is allocated before the first push.

        Args:
            config: the model.
            precision: of the weights: "exact" (the trainer's dtype), "float32", "bfloat16", "int8", "fp8".
            compute_dtype: "float32" or "bfloat16", of activations and products.
            kv_cache_dtype: "auto" (the compute dtype) or "fp8" (float8_e4m3fn, scale 1).
            max_total_tokens: longest prompt with its completion.
            prompt_buckets: lengths that prompts are padded to; empty: powers of two from 16. The longest is the longest
                prompt allowed.
            max_rows: completions in one batch; bounds the memory of the cache.
            min_rows: a batch is not made smaller than this when rows finish.
            cache_block: completion slots of the cache at first; doubles when they are full.
            mesh: devices to split rows over, whatever its axes; None is the first local device. Weights are
                whole on each device.

        Raises:
            ValueError: for a setting out of range, naming it.
        """
        _allowed("precision", precision, PRECISIONS)
        _allowed("compute_dtype", compute_dtype, ("float32", "bfloat16"))
        _allowed("kv_cache_dtype", kv_cache_dtype, ("auto", "fp8"))
        sizes = {"max_rows": max_rows, "min_rows": min_rows, "cache_block": cache_block}
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}: got {value}, must be at least 1")
        if not 2 <= max_total_tokens <= config.max_position_embeddings:
            raise ValueError(
                f"max_total_tokens: got {max_total_tokens}, must be between 2 and the model's "
                f"max_position_embeddings={config.max_position_embeddings}"
            )
        if list(prompt_buckets) != sorted(set(prompt_buckets)) or any(bucket < 1 for bucket in prompt_buckets):
            raise ValueError(f"prompt_buckets: got {tuple(prompt_buckets)}, must be positive and ascending")
        self.config = config
        self.precision = precision
        self.max_total_tokens = max_total_tokens
        self._prompt_buckets = tuple(prompt_buckets) or _powers_of_two(max_total_tokens)
        self._max_rows, self._min_rows, self._cache_block = max_rows, min_rows, cache_block
        devices = np.asarray(jax.local_devices()[:1]) if mesh is None else mesh.devices.reshape(-1)
        self._mesh = Mesh(devices, ("rows",))
        cache_dtype = "float8_e4m3fn" if kv_cache_dtype == "fp8" else compute_dtype
        self._program = decode.Program(config, compute_dtype, cache_dtype, self._mesh)
        self._weights: Params | None = None
        self._policy_version: int | None = None
        self._fingerprint: int | None = None

    @property
    def policy_version(self) -> int | None:
        """The version of the last push; None before it and after `close`."""
        return self._policy_version

    @property
    def weights_fingerprint(self) -> int | None:
        """CRC-32 of the checksums of the weights in use (see `weights.fingerprint`); None without weights."""
        return self._fingerprint

    def push_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Copies the trainer's parameters in the engine's precision and proves the copy by its checksums.

        Quantised precisions quantise again at every push. The trainer may donate or delete `params` afterwards.

        Returns:
            Nothing measured: an empty dict.

        Raises:
            ValueError: for parameters that are not those of the model.
            EngineError: if the checksums of the engine's weights differ from the trainer's.
        """
        check_params(params, self.config)
        placed = jax.device_put(params, NamedSharding(self._mesh, P()))
        # The old weights go first: two copies need not fit.
        self.close()
        weights = convert(placed, self.config, self.precision)
        expected, consumed = source_fingerprint(placed, self.precision), fingerprint(weights)
        if not np.array_equal(expected, consumed):
            wrong = np.flatnonzero(expected != consumed)
            raise EngineError(f"weights of version {policy_version}: {wrong.size} of {expected.size} checksums differ")
        self._weights, self._policy_version = weights, policy_version
        self._fingerprint = zlib.crc32(consumed.tobytes())
        logger.debug("weights of version %d in use, fingerprint %08x", policy_version, self._fingerprint)
        return {}

    def generate(self, prompts: Sequence[np.ndarray], sampling: SamplingParams, *, seed: int, step: int) -> Rollout:
        """Samples `group_size` completions for each prompt.

        Args:
            prompts: int32 token ids, one array per prompt.
            sampling: the distribution; at temperature 0 `top_p` has no meaning.
            seed, step: 0 .. 2^32 - 1; with the row they determine the random numbers.

        Returns:
            The completions in order, `prompt * group_size + member`.

        Raises:
            ValueError: for no prompts, an empty one, an id outside the vocabulary, a prompt too long for the engine, or
                a seed or step out of range.
            EngineError: if no weights were pushed.
        """
        if self._weights is None:
            raise EngineError("no weights: push_weights must come before generate")
        for name, value in (("seed", seed), ("step", step)):
            if not 0 <= value < 2**32:
                raise ValueError(f"{name}: got {value}, must be in 0 .. 2^32 - 1")
        limits = {"vocab_size": self.config.vocab_size, "limit": self.max_total_tokens}
        prompts = checked_sequences(prompts, "prompt", **limits, reserve=sampling.max_completion_tokens)
        longest = self._prompt_buckets[-1]
        for index, prompt in enumerate(prompts):
            if prompt.size > longest:
                raise ValueError(f"prompt {index}: {prompt.size} tokens, the longest prompt bucket has {longest}")
        group = sampling.group_size
        # Whole groups together, prompts of like lengths together.
        size = self._max_rows // group * group or self._max_rows
        order = np.argsort([prompt.size for prompt in prompts], kind="stable")
        rows = (order[:, None] * group + np.arange(group)).reshape(-1)
        chunks = [rows[start : start + size] for start in range(0, rows.size, size)]
        tokens: list[np.ndarray] = [np.empty(0, np.int32)] * rows.size
        logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * rows.size
        for chunk in chunks:
            for row, *sampled in self._sample(prompts, chunk, min(size, rows.size), sampling, seed, step):
                tokens[row], logprobs[row] = sampled
        stops = set(sampling.stop_token_ids)
        return Rollout(
            prompt_ids=[prompts[row // group] for row in range(rows.size)],
            completion_ids=tokens,
            rollout_logprobs=logprobs,
            finish_reasons=["stop" if int(row[-1]) in stops else "length" for row in tokens],
            group_ids=np.repeat(np.arange(len(prompts), dtype=np.int32), group),
            policy_version=self._policy_version,
        )

    def _sample(
        self, prompts: list[np.ndarray], rows: np.ndarray, size: int, sampling: SamplingParams, seed: int, step: int
    ) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """One batch of at most `size` rows: (row, tokens, log-probs) of each."""
        limit, devices = sampling.max_completion_tokens, self._mesh.size
        members = list(dict.fromkeys((rows // sampling.group_size).tolist()))
        bucket = _bucket(max(prompts[index].size for index in members), self._prompt_buckets)
        # A batch that is no whole number of groups may begin and end within one.
        count = -(-size // sampling.group_size) + (size % sampling.group_size > 0)
        groups = min(count, -(-count * self.config.num_heads * bucket**2 // _ATTENTION_ELEMENTS))
        padded = np.zeros((_round_up(count, groups * devices), bucket), np.int32)
        lengths = np.ones(padded.shape[0], np.int32)
        for place, index in enumerate(members):
            padded[place, : prompts[index].size] = prompts[index]
            lengths[place] = prompts[index].size
        ids = np.full(_round_up(size, devices), -1, np.int32)
        ids[: rows.size] = rows
        place_of = {index: place for place, index in enumerate(members)}
        row_prompts = np.zeros(ids.size, np.int32)
        row_prompts[: rows.size] = [place_of[index] for index in (rows // sampling.group_size).tolist()]
        capacity = min(self._cache_block, limit)
        state = decode.prefill(
            self._weights, padded, lengths, row_prompts, ids, np.uint32(seed), np.uint32(step),
            program=self._program, capacity=capacity, groups=groups,
        )  # fmt: skip

        mode = "greedy" if sampling.temperature == 0 else "sample" if sampling.top_p == 1 else "nucleus"
        inverse = np.float32(1 / sampling.temperature if sampling.temperature else 1)
        stops = np.asarray(sampling.stop_token_ids, np.int32)
        # Rows by number within this batch; padding is -1.
        where = np.where(ids < 0, -1, np.arange(ids.size))
        tokens = np.zeros((rows.size, limit), np.int32)
        logprobs = np.zeros((rows.size, limit), np.float32)
        lengths_out = np.zeros(rows.size, np.int32)
        done, first = ids < 0, 0
        while first < limit and not done.all():
            if (smaller := self._shrunk(done)) < done.size:
                live = np.flatnonzero(~done)
                keep = np.resize(live, smaller)
                padding = np.arange(smaller) >= live.size
                state = decode.shrink(state, keep.astype(np.int32), padding, program=self._program)
                where, done = np.where(padding, -1, where[keep]), padding
            if first == capacity:
                extra = min(capacity, limit - capacity)
                state = decode.grow(state, extra=extra, program=self._program)
                capacity += extra
            half = _round_up(-(-done.size // 2), devices)
            floor = half if half >= self._min_rows and half < done.size else 0
            state, decoded = decode.decode(
                self._weights, state, np.int32(first), np.int32(capacity), np.int32(floor), inverse,
                np.float32(sampling.top_p), stops, program=self._program, prompt_slots=bucket, mode=mode,
            )  # fmt: skip
            end, real = int(decoded.end), where >= 0
            tokens[where[real], first:end] = np.asarray(decoded.tokens)[: end - first, real].T
            logprobs[where[real], first:end] = np.asarray(decoded.logprobs)[: end - first, real].T
            lengths_out[where[real]] = np.asarray(state.sampled)[real]
            done, first = np.asarray(state.done), end
        return [
            (int(row), tokens[place, :length], logprobs[place, :length])
            for place, (row, length) in enumerate(zip(rows, lengths_out, strict=True))
        ]

    def _shrunk(self, done: np.ndarray) -> int:
        """The row count after halving for as long as the live rows fit and it is not below `min_rows`."""
        size, live = done.size, int((~done).sum())
        while (half := _round_up(-(-size // 2), self._mesh.size)) < size and half >= max(live, self._min_rows):
            size = half
        return size

    def score(
        self, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        """The engine's own log-probs of given completions, all tokens of a row in one pass.

        They differ from those reported while sampling by the rounding of differently shaped products alone: the
        engine's noise floor.

        Args:
            prompts: int32 token ids, one array per completion.
            completions: int32 token ids.
            temperature: divides the logits; 0 gives the log-probs at temperature 1, as `generate` does.

        Returns:
            Per completion [T] float32 nats, full support.

        Raises:
            ValueError: for an empty prompt or completion, an id outside the vocabulary, a row over
                `max_total_tokens`, lists of different lengths, or a negative temperature.
            EngineError: if a log-prob is not finite, or no weights were pushed.
        """
        if self._weights is None:
            raise EngineError("no weights: push_weights must come before score")
        if not temperature >= 0:
            raise ValueError(f"temperature: got {temperature}, must be 0 (scored at 1) or above")
        prompts, rows = scored_rows(
            prompts, completions, vocab_size=self.config.vocab_size, limit=self.max_total_tokens
        )
        inverse = np.float32(1 / temperature if temperature else 1)
        buckets = [_bucket(row.size, _powers_of_two(self.max_total_tokens)) for row in rows]
        results: list[np.ndarray] = [np.empty(0, np.float32)] * len(rows)
        for length in sorted(set(buckets)):
            members = [index for index, bucket in enumerate(buckets) if bucket == length]
            fit = _ATTENTION_ELEMENTS // (self.config.num_heads * length**2)
            size = max(1, min(self._max_rows, fit, 1 << (len(members) - 1).bit_length()))
            for start in range(0, len(members), size):
                part = members[start : start + size]
                padded = np.zeros((_round_up(size, self._mesh.size), length), np.int32)
                lengths = np.ones(padded.shape[0], np.int32)
                for place, index in enumerate(part):
                    padded[place, : rows[index].size] = rows[index]
                    lengths[place] = rows[index].size
                split = NamedSharding(self._mesh, P("rows"))
                padded, lengths = jax.device_put((padded, lengths), split)
                logprobs = np.asarray(decode.score(self._weights, padded, lengths, inverse, program=self._program))
                for place, index in enumerate(part):
                    results[index] = logprobs[place, prompts[index].size - 1 : rows[index].size - 1].copy()
        check_finite(results)
        return results

    def close(self) -> None:
        """Drops the weights; compiled programs stay. Safe to call twice."""
        self._weights = self._policy_version = self._fingerprint = None


def _allowed(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: got {value!r}, allowed are {', '.join(allowed)}")


def _powers_of_two(limit: int) -> tuple[int, ...]:
    """16, 32, ... up to the first that holds `limit`."""
    top = max(_SMALLEST_BUCKET, 1 << (limit - 1).bit_length())
    return tuple(_SMALLEST_BUCKET << i for i in range((top // _SMALLEST_BUCKET).bit_length()))


def _bucket(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`."""
    return next(bucket for bucket in buckets if bucket >= length)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

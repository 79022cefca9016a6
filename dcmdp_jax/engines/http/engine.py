"""Client of a vLLM server with its own weights, an engine for evaluation and scoring."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, Episode, OpenGroups, single_turn
from dcmdp_jax.engines.engine_kind import EngineArguments, check_temperature
from dcmdp_jax.engines.http.client import Json, VllmHttpClient
from dcmdp_jax.engines.protocol import (
    EngineError,
    SamplingParams,
    TokenRows,
    checked_sequences,
    scored_rows,
)
from dcmdp_jax.engines.vllm_common import VLLM_TEMPERATURES, request_seeds
from dcmdp_jax.errors import ArgumentError, UserError
from dcmdp_jax.types import Params

logger = logging.getLogger(__name__)

# JSON has no minus infinity; vLLM writes this.
_MINUS_INFINITY = -9999.0
_ROUNDING = 1e-3
_MEASURED_TOKENS = 5


class RemoteEngine:
    """The `Engine` protocol over a vLLM server's OpenAI-compatible interface, but for new weights.

    Token ids cross the wire, never text. Each completion is a request with a seed of its own, a
    function of (seed, step, row): the same call gives the same tokens as far as the server repeats
    itself, that is up to what batch composition does to its rounding.

    Which distribution its log-probs belong to is settled where the server is started.
    `--logprobs-mode raw_logprobs`, vLLM's default, ignores temperature and top-p;
    `processed_logprobs` is the distribution sampled from. The two agree at temperature 1 with top-p
    1, and at temperature 0, where the protocol wants log-probs of temperature 1. Elsewhere the
    engine measures, once, which it is. With a server that reports raw ones
    `Episode.rollout_logprobs` is all NaN there, which says that they are not known: the tokens are
    right, and evaluation reads nothing else, but `protocol.unusable_completions` and arithmetic
    refuse NaN, so no log-prob of another distribution is taken for the right one. A warning says so
    once.
    """

    def __init__(self, arguments: EngineArguments, *, retries: int = 3) -> None:
        """Ask the server for its model and version, and refuse one that won't do.

        The environment variable VLLM_API_KEY, where it is set, is sent as the bearer token and
        shown nowhere.

        Args:
            arguments: `model` is the one that the server is believed to hold; it bounds the token
                ids. At most `max_rows` requests are in flight.
            retries: further attempts after a failed connection, a 5xx answer or a timeout.

        Raises:
            UserError: for an address that is none, a vLLM version not supported, or a server with a
                shorter context.
            EngineError: if the server can't be reached or gives no sensible answer.
        """
        self.config = arguments.model
        self.max_total_tokens = arguments.max_total_tokens
        server = arguments.settings.server
        self.server = VllmHttpClient(
            server,
            timeout_s=arguments.settings.timeout_s,
            max_concurrent=arguments.max_rows,
            retries=retries,
        )
        context = self.server.max_model_len
        if context < self.max_total_tokens:
            raise ArgumentError(
                "max_total_tokens",
                f"got {self.max_total_tokens}, the server at {server} has "
                f"max_model_len={context}; start it with --max-model-len {self.max_total_tokens} "
                "or more, or allow shorter completions",
            )
        self._top_logprobs = arguments.top_logprobs
        self._processed: bool | None = None
        self._warned = False

    def sync_weights(self, params: Params, policy_version: int) -> dict[str, float]:
        """Refuse new weights.

        Raises:
            EngineError: the server holds its own weights.
        """
        raise EngineError(
            f"sync_weights: the vLLM server at {self.server.address} holds its own weights and "
            "takes no others; training needs an engine that does, such as vllm or local"
        )

    def generate(
        self,
        prompts: TokenRows,
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        """See `Engine.generate`; log-probs are NaN where the server's are of another distribution.

        Raises:
            ValueError: also for a temperature that vLLM does not take as it is. Nothing was sent
                then.
            EngineError: if the server fails, or gives an answer that can't be right.
        """
        temperature = sampling.temperature
        group = sampling.group_size
        check_temperature("http", temperature, VLLM_TEMPERATURES)
        prompts = checked_sequences(self, prompts, "prompt", reserve=sampling.max_completion_tokens)
        rows = first_prompt * group + np.arange(len(prompts) * group)
        seeds = request_seeds(seed, step, rows).tolist()
        reports_logprobs = (
            temperature == 0
            or (temperature == 1 and not sampling.cuts)
            or self._reports_processed(prompts[0])
        )
        top = self._top_logprobs if temperature else 0
        if top and not reports_logprobs:
            raise EngineError(
                f"generate: the server at {self.server.address} was not seen to report log-probs "
                "of the distribution sampled from, which `top_logprobs` needs; start it with "
                "--logprobs-mode processed_logprobs"
            )

        payloads = []
        for row, row_seed in enumerate(seeds):
            payload = {
                "prompt": prompts[row // group].tolist(),
                "max_tokens": sampling.max_completion_tokens,
                "temperature": temperature,
                "stop_token_ids": list(sampling.stop_token_ids),
            }
            if temperature:
                payload |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "seed": row_seed}
            if reports_logprobs:
                payload["logprobs"] = top
            payloads.append(payload)

        def read(row: int, choice: Json) -> Episode:
            tokens, reason = _sampled(choice, sampling, self.config.vocab_size)
            logprobs = np.full(tokens.size, np.nan, np.float32)
            columns = {}
            if reports_logprobs:
                logprobs = _logprobs(choice["logprobs"]["token_logprobs"], tokens.size)
            if top:
                columns = _top_tokens(choice["logprobs"]["top_logprobs"], tokens, top)
            return single_turn(
                prompts[row // group],
                tokens,
                logprobs,
                policy_version=0,
                group=row // group,
                member=row % group,
                finish_reason=reason,
                **columns,
            )

        def groups() -> Iterator[list[Episode]]:
            open_groups = OpenGroups(group)
            calls = self.server.complete("generate: completion", payloads, read)
            with contextlib.closing(calls.values()) as values:
                for episodes in values:
                    yield open_groups.add(episodes or [])

        return groups()

    def score(
        self,
        prompts: TokenRows,
        completions: TokenRows,
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        """See `Engine.score`; each row in one pass as a prompt, at temperature 1 (or 0) alone.

        Raises:
            ValueError: also for another temperature, or a row that fills the server's context,
                which has to hold one token more. Nothing was sent then.
        """
        if temperature not in (0, 1):
            raise ArgumentError(
                "temperature",
                f"got {temperature}, a vLLM server scores at 1 (or 0, which means 1) alone",
            )
        prompts, rows = scored_rows(self, prompts, completions, temperature)
        context = self.server.max_model_len
        for index, row in enumerate(rows):
            if row.size >= context:
                raise UserError(
                    f"prompt and completion {index}: {row.size} tokens, to be scored they must "
                    f"leave one of the server's max_model_len={context} free; start it with "
                    f"--max-model-len {row.size + 1} or more"
                )
        payloads = []
        for row in rows:
            payload = {
                "prompt": row.tolist(),
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": 0,
            }
            payloads.append(payload)

        def read(index: int, choice: Json) -> np.ndarray:
            entries = choice["prompt_logprobs"]
            prompt_length = prompts[index].size
            tokens = rows[index][prompt_length:].tolist()
            if len(entries) != rows[index].size:
                raise ValueError(f"{len(entries)} prompt_logprobs for {rows[index].size} tokens")
            logprobs = []
            for entry, token in zip(entries[prompt_length:], tokens, strict=True):
                logprobs.append(entry[str(token)]["logprob"])
            return _logprobs(logprobs, len(tokens))

        [logprobs] = self.server.complete("score: completion", payloads, read).results()
        return logprobs

    def release_weights(self) -> None:
        """Do nothing: the server keeps its weights."""

    def close(self) -> None:
        """Do nothing: no resource is held between calls."""

    def _reports_processed(self, prompt: np.ndarray) -> bool:
        """Whether the server's log-probs follow the temperature; measured until it is clear."""
        if self._processed is None:
            self._processed = self._measure_processed(prompt)
        if not self._processed and not self._warned:
            self._warned = True
            logger.warning(
                "the vLLM server at %s was not seen to report log-probs of the distribution "
                "sampled from: the rollout's are NaN. Evaluation does without; for others start "
                "it with --logprobs-mode processed_logprobs",
                self.server.address,
            )
        return bool(self._processed)

    def _measure_processed(self, prompt: np.ndarray) -> bool | None:
        """Whether log-probs follow the temperature at the first token after `prompt`.

        From temperature 1 to 2 the distances of the most likely tokens from the first stay as they
        are in raw log-probs and halve in processed ones.

        Returns:
            None if that is unclear.
        """
        payload = {
            "prompt": prompt.tolist(),
            "max_tokens": 1,
            "logprobs": _MEASURED_TOKENS,
        }
        payloads = [payload | {"temperature": temperature} for temperature in (1.0, 2.0)]

        def read(index: int, choice: Json) -> dict[str, float]:
            (top,) = choice["logprobs"]["top_logprobs"]
            logprobs = _logprobs(list(top.values()), len(top))
            total = float(np.exp(logprobs, dtype=np.float64).sum())
            if total > 1 + _ROUNDING:
                raise ValueError(
                    _logits(f"{len(top)} tokens have a probability of {total:.4g} together")
                )
            return top

        calls = self.server.complete("log-probs mode: measurement", payloads, read)
        [(cool, hot)] = calls.results()
        common = sorted(cool.keys() & hot.keys(), key=lambda token: -cool[token])
        before = np.asarray([cool[token] - cool[common[0]] for token in common])
        after = np.asarray([hot[token] - hot[common[0]] for token in common])
        # Half a nat and more between the tokens, so that the rounding of one batch and another
        # can't decide.
        if not before @ before > 0.25:
            return None
        slope = float(before @ after / (before @ before))
        if abs(slope - 0.5) < 0.15:
            return True
        if abs(slope - 1) < 0.15:
            return False
        return None


def _sampled(choice: Json, sampling: SamplingParams, vocab_size: int) -> tuple[np.ndarray, str]:
    """Token ids and finish reason of a completion that is what was asked for."""
    ids = choice["token_ids"]
    reason = choice["finish_reason"]
    limit = sampling.max_completion_tokens
    if not 1 <= len(ids) <= limit:
        raise ValueError(f"{len(ids)} token_ids, must be 1 .. {limit}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"token id {token!r} is outside 0 .. {vocab_size - 1}")
    stops = [index for index, token in enumerate(ids) if token in sampling.stop_token_ids]
    if stops:
        expected = "stop"
        complete = stops == [len(ids) - 1]
    else:
        expected = "length"
        complete = len(ids) == limit
    if reason != expected or not complete:
        raise ValueError(
            f"finish_reason {reason!r} after {len(ids)} of {limit} tokens, the last being "
            f"{ids[-1]}, agrees with neither stop_token_ids nor the limit; start the server with "
            "--generation-config vllm"
        )
    return np.asarray(ids, np.int32), expected


def _logprobs(values: list[Any], count: int) -> np.ndarray:
    """[count] float32 from JSON, refused unless they can be log-probs."""
    if len(values) != count:
        raise ValueError(f"{len(values)} log-probs for {count} tokens")
    array = np.asarray([float(value) for value in values], np.float32)
    wrong = ~np.isfinite(array) | (array <= _MINUS_INFINITY)
    if wrong.any():
        token = int(np.argmax(wrong))
        raise ValueError(f"the log-prob of token {token} is {values[token]}, not finite")
    if (array > _ROUNDING).any():
        raise ValueError(_logits(f"a log-prob is {array.max():.4g}"))
    return array


def _top_tokens(listed: list[Json], tokens: np.ndarray, top: int) -> dict[str, np.ndarray]:
    """The columns of the top-k tokens.

    The server lists `top` and, where it is none of them, the sampled token.
    """
    if len(listed) != tokens.size:
        raise ValueError(f"{len(listed)} top_logprobs for {tokens.size} tokens")
    ids = np.full((tokens.size, top), -1, np.int32)
    logprobs = np.zeros((tokens.size, top), np.float32)
    for index, (entries, token) in enumerate(zip(listed, tokens.tolist(), strict=True)):
        listed_logprobs = {}
        for name, value in entries.items():
            listed_logprobs[int(name.removeprefix("token_id:"))] = float(value)
        if token not in listed_logprobs:
            raise ValueError(f"the top_logprobs of token {index} lack the sampled token {token}")
        likely = sorted(listed_logprobs.items(), key=lambda entry: -entry[1])[:top]
        likely = [entry for entry in likely if entry[1] > _MINUS_INFINITY]
        ids[index, : len(likely)], logprobs[index, : len(likely)] = zip(*likely, strict=True)
    return {TOP_IDS: ids, TOP_LOGPROBS: logprobs}


def _logits(symptom: str) -> str:
    return (
        f"{symptom}: the server reports logits; start it with --logprobs-mode processed_logprobs "
        "or raw_logprobs"
    )

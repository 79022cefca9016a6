"""Episodes: the tokens that an engine sampled after one prompt, with columns for each token.

An episode, the packed rows, what processes exchange, the shapes and the memory of a batch and the
sidecar's replies follow from `COLUMNS`. A new column is one entry: an engine gives it with its
episodes (`Episode.columns`), the step reads it from the rows (`Rows.columns`).
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from dcmdp_jax.errors import UserError
from dcmdp_jax.types import TOP_IDS

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """One array with an entry for each token.

    Attributes:
        doc: meaning of an entry.
        dtype: the array's type.
        fill: entry of padding, and of a token that the column says nothing about.
        covers_given: whether it has entries for tokens that the policy did not sample: a prompt,
            the output of a tool. In another column they are `fill`.
        axes: names of the axes after the token axis, of `column_shapes`.
    """

    doc: str
    dtype: type[np.generic]
    fill: int | float
    covers_given: bool = False
    axes: tuple[str, ...] = ()


TOP_LOGPROBS = "top_logprobs"
OLD_TOP_LOGPROBS = "old_top_logprobs"
TEACHER_LOGPROBS = "teacher_logprobs"

COLUMNS: dict[str, Column] = {
    "rollout_logprobs": Column(
        "nats, of the sampled token by the inference engine, under the distribution sampled from",
        np.float32,
        0.0,
    ),
    "policy_versions": Column("the training step whose weights sampled the token", np.int32, -1),
    "routed_experts": Column(
        "[layers, k], the experts of each layer that the engine sent the token to when it read "
        "it; a forward pass uses them (router replay). -1 for a token that was not read, such as "
        "the last",
        np.int16,
        -1,
        covers_given=True,
        axes=("layers", "experts_per_token"),
    ),
    "old_logprobs": Column(
        "nats, of the sampled token by the training stack, under the weights that sampled it; of "
        "a run whose batches lag behind the policy. The trainer computes it",
        np.float32,
        0.0,
    ),
    TOP_IDS: Column(
        "[k], the engine's top-k ids in the place of the sampled token, most probable first; -1 "
        "where it samples fewer",
        np.int32,
        -1,
        axes=("k",),
    ),
    TOP_LOGPROBS: Column(
        "[k], nats, of these ids by the engine, under the distribution sampled from",
        np.float32,
        0.0,
        axes=("k",),
    ),
    OLD_TOP_LOGPROBS: Column("[k], `old_logprobs` of these ids", np.float32, 0.0, axes=("k",)),
    TEACHER_LOGPROBS: Column("nats, of the sampled token by a teacher", np.float32, 0.0),
}

ROW_LAYOUT: dict[str, type[np.generic]] = {
    "input_ids": np.int32,
    "position_ids": np.int32,
    "segment_ids": np.int32,
    "completion_mask": np.bool_,
    "completion_index": np.int32,
}
"""Field of `types.Rows` that packing itself writes -> dtype; 0 on padding."""


def declared_column(name: str) -> Column:
    """The declaration of a column.

    Raises:
        UserError: if there is none.
    """
    if name not in COLUMNS:
        raise UserError(
            f"column {name!r} is not declared in data/episode.py; declared are {', '.join(COLUMNS)}"
        )
    return COLUMNS[name]


def column_shapes(names: Collection[str], *, k: int, routing: Sequence[int]) -> dict[str, Shape]:
    """The shape of the entries of columns, the axes after the token axis, by name.

    Args:
        names: names in `COLUMNS`.
        k: top ids of a token.
        routing: layers, and experts of a token in each.
    """
    sizes = {"k": k, "layers": routing[0], "experts_per_token": routing[1]}
    shapes = {}
    for name, column in COLUMNS.items():
        if name in names:
            shapes[name] = tuple(sizes[axis] for axis in column.axes)
    return shapes


def common_columns(episodes: Sequence["Episode"]) -> dict[str, Shape]:
    """The columns that several episodes have, and the shape of their entries.

    Args:
        episodes: at least one.

    Raises:
        UserError: naming the first completion that has a column more or less than completion 0, or
            one of another shape; or a column that is not declared.
    """
    entry_shapes = {name: values.shape[1:] for name, values in episodes[0].columns.items()}
    for i, episode in enumerate(episodes):
        length = len(episode.token_ids)
        shapes = {name: values.shape for name, values in episode.columns.items()}
        expected = {name: (length, *shape) for name, shape in entry_shapes.items()}
        for name in sorted(shapes.keys() | expected.keys()):
            declared_column(name)  # raises for a name that is not declared
            if shapes.get(name) != expected.get(name):
                label = name.replace("_", " ")
                raise UserError(
                    f"rollout: completion {i}: {label} of shape {shapes.get(name)}, expected "
                    f"{expected.get(name)}"
                )
    return entry_shapes


def over_sequence(name: str, values: np.ndarray, sampled_mask: np.ndarray) -> np.ndarray:
    """A column of a whole sequence from what an engine has of it.

    Args:
        name: the column's name.
        values: [n, ...]; n is at most T of a column that given tokens have (it lacks the last,
            unread ones), else the number of sampled tokens.
        sampled_mask: [T] bool.

    Returns:
        [T, ...], the column's fill where `values` says nothing.
    """
    column = declared_column(name)
    sequence = np.full((sampled_mask.size, *values.shape[1:]), column.fill, column.dtype)
    if column.covers_given:
        sequence[: len(values)] = values
    else:
        sequence[sampled_mask] = values
    return sequence


@dataclasses.dataclass(frozen=True, eq=False)
class Episode:
    """A prompt and everything after it.

    The policy sampled the tokens of `sampled_mask`. The others are given: the prompt, or the output
    of a tool.

    Attributes:
        token_ids: [T] int32, the end-of-sequence token included when it was sampled.
        sampled_mask: [T] bool; the first token is never sampled.
        group: index of the prompt in the call of `generate`.
        member: 0 .. group_size - 1, which completion of its group.
        finish_reason: "stop" (sampled an end token) or "length".
        columns: name -> [T, ...], the further arrays with an entry for each token, as declared in
            `COLUMNS`. Entries of tokens that a column says nothing about are undefined.
    """

    token_ids: np.ndarray
    sampled_mask: np.ndarray
    group: int
    member: int
    finish_reason: str
    columns: Mapping[str, np.ndarray]

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """[T] float32 nats, under the distribution sampled from; undefined where not sampled."""
        return self.columns["rollout_logprobs"]

    @property
    def policy_versions(self) -> np.ndarray:
        """[T] int32, the training step whose weights sampled; undefined where not sampled."""
        return self.columns["policy_versions"]

    def with_columns(self, **columns: np.ndarray) -> "Episode":
        """The episode with columns added or replaced, [T, ...] each."""
        return dataclasses.replace(self, columns={**self.columns, **columns})

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first sampled one."""
        return int(np.argmax(self.sampled_mask))

    @property
    def prompt_ids(self) -> np.ndarray:
        """[P] int32, the tokens before the first sampled one."""
        return self.token_ids[: self.prompt_length]

    @property
    def completion_ids(self) -> np.ndarray:
        """[T - P] int32, everything after the prompt, given tokens included."""
        return self.token_ids[self.prompt_length :]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens, |o_i|."""
        return int(np.count_nonzero(self.sampled_mask))


def single_turn(
    prompt_ids: np.ndarray,
    completion_ids: np.ndarray,
    logprobs: np.ndarray,
    *,
    policy_version: int,
    group: int,
    member: int,
    finish_reason: str,
    **columns: np.ndarray | None,
) -> Episode:
    """Make the episode of one completion, sampled by one version of the policy.

    Args:
        prompt_ids: [P] int32, at least one token.
        completion_ids: [C] int32, at least one token.
        logprobs: [C] float32 nats.
        policy_version, group, member, finish_reason: see `Episode`.
        columns: further columns by their names in `COLUMNS`; of a column that given tokens have [P
            + C, ...] or fewer, without the last tokens; else [C, ...]. None: the engine has none.
    """
    token_ids = np.concatenate([prompt_ids, completion_ids], dtype=np.int32)
    sampled_mask = np.arange(token_ids.size) >= len(prompt_ids)
    versions = np.full(len(completion_ids), policy_version, np.int32)
    columns = {"rollout_logprobs": logprobs, "policy_versions": versions, **columns}
    sequences = {}
    for name, values in columns.items():
        if values is not None:
            sequences[name] = over_sequence(name, values, sampled_mask)
    return Episode(
        token_ids=token_ids,
        sampled_mask=sampled_mask,
        group=group,
        member=member,
        finish_reason=finish_reason,
        columns=sequences,
    )


class OpenGroups:
    """Episodes of one call of `generate`, held until their group is complete.

    Args:
        group_size: episodes of a group.
    """

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._waiting: dict[int, list[Episode]] = {}

    def add(self, episodes: Iterable[Episode]) -> list[Episode]:
        """Add finished episodes; return the groups that they complete, in prompt order."""
        complete = []
        for episode in episodes:
            group = self._waiting.setdefault(episode.group, [])
            group.append(episode)
            if len(group) == self._group_size:
                complete += self._waiting.pop(episode.group)
        return in_prompt_order(complete)


def collect(groups: Iterable[Iterable[Episode]]) -> list[Episode]:
    """All episodes of a call of `generate`, in prompt order."""
    return in_prompt_order(itertools.chain.from_iterable(groups))


def in_prompt_order(episodes: Iterable[Episode]) -> list[Episode]:
    """Sort episodes by prompt, then member: the order they finish in must not change learning."""
    return sorted(episodes, key=lambda episode: (episode.group, episode.member))


def identical_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Share of completions that equal another of their prompt, and what independence gives.

    Given a completion of probability q under the engine, one of G - 1 independent others is equal
    with probability 1 - (1 - q)^(G - 1), so the means of both have one expectation, whatever the
    policy.
    """
    texts = [episode.token_ids.tobytes() for episode in episodes]
    prompts = [episode.prompt_ids.tobytes() for episode in episodes]
    text_counts = Counter(texts)
    prompt_counts = Counter(prompts)
    logprobs = []
    for episode in episodes:
        sampled = episode.rollout_logprobs[episode.sampled_mask]
        logprobs.append(float(sampled.sum(dtype=np.float64)))
    group_sizes = np.array([prompt_counts[prompt] for prompt in prompts])
    chances = 1 - (1 - np.minimum(np.exp(logprobs), 1.0)) ** (group_sizes - 1)
    chance = 0.0
    if np.isfinite(chances).any():
        chance = float(np.nanmean(chances))
    return {
        "completion/identical_fraction": float(np.mean([text_counts[text] > 1 for text in texts])),
        "completion/identical_chance": chance,
    }

"""verl's signature of a reward function, called as one of TRL's.

    def compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}

is called once for each completion. The arguments come from the columns of verl's schema: `data_source`,
`reward_model["ground_truth"]` (any JSON) and `extra_info`; without a `reward_model`, from a column `ground_truth`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def has_verl_signature(signature: inspect.Signature) -> bool:
    """Whether a function takes verl's arguments: no function of TRL's signature has a `solution_str`."""
    return "solution_str" in signature.parameters


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function of TRL's signature that calls one of verl's.

    The other values of a dict that `compute_score` returns are logged by `log_extra`, under the names that they have.

    Args:
        compute_score: the function. It gets those of its four arguments that it has a parameter for.
    """
    parameters = inspect.signature(compute_score).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def reward(
        completions: Sequence[Any], log_extra: Callable[[str, list[Any]], None], **columns: Sequence[Any]
    ) -> list[Any]:
        scores: list[Any] = []
        for row, completion in enumerate(completions):
            cells = {name: column[row] for name, column in columns.items() if name in _COLUMNS}
            model = cells.pop("reward_model", None)
            arguments = {
                "data_source": cells.get("data_source"),
                "solution_str": completion_text(completion),
                "ground_truth": model.get("ground_truth") if isinstance(model, Mapping) else cells.get("ground_truth"),
                "extra_info": cells.get("extra_info"),
            }
            scores.append(compute_score(**{k: v for k, v in arguments.items() if takes_all or k in parameters}))
        names = dict.fromkeys(name for score in scores if isinstance(score, Mapping) for name in score)
        for name in names:
            if name != "score":
                log_extra(str(name), [score.get(name) if isinstance(score, Mapping) else None for score in scores])
        return [score.get("score") if isinstance(score, Mapping) else score for score in scores]

    return reward


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Text of a completion as reward functions get it: itself, or its messages' contents."""
    return completion if isinstance(completion, str) else "".join(message["content"] for message in completion)


_COLUMNS = ("data_source", "reward_model", "ground_truth", "extra_info")

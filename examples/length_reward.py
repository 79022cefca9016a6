"""A reward of your own: short completions earn more.

    dcmdp train --config=configs/demo.py --config.rewards.functions=examples/length_reward.py:score

trains for short completions and nothing else. Beside the reward for right answers, with a weight
each:

    dcmdp train --config=configs/demo.py \
        --config.rewards.functions=math,examples/length_reward.py:score \
        --config.rewards.weights=1,0.2
"""

_LONGEST = 36  # rollout.max_completion_tokens of configs/demo.py


def score(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """1 for a completion without tokens, 0 for one of 36 tokens or more.

    Args:
        completion_ids: the sampled tokens of each completion.
        columns: `prompts`, `completions` and the data's columns, which this reward does not need.
    """
    return [max(0.0, 1.0 - len(ids) / _LONGEST) for ids in completion_ids]

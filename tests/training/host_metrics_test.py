"""Host-side metrics of a step against hand counts."""

import numpy as np
import pytest

from dcmdp_jax.observe.metric_names import METRICS
from dcmdp_jax.rewards.math.verifier import Grades
from dcmdp_jax.training.rollout_record import length_metrics
from tests.support.sampling import Rollout


def test_each_kind_of_ungraded_answer_has_its_own_count():
    rollout = Rollout(
        prompt_ids=[np.array([1, 2])] * 4,
        completion_ids=[
            np.array([3]),
            np.array([3, 4]),
            np.array([3, 4, 5]),
            np.array([3, 4, 5, 6]),
        ],
        rollout_logprobs=[np.zeros(1), np.zeros(2), np.zeros(3), np.zeros(4)],
        finish_reasons=["stop", "length", "stop", "stop"],
        group_ids=np.zeros(4, np.int32),
        policy_version=0,
    )
    grades = Grades(
        rewards=np.zeros(4, np.float32), errors=1, timeouts=2, over_budget=3, unparsed=1
    )
    metrics = length_metrics(rollout.episodes, grades)
    assert metrics == pytest.approx(
        {
            "completion/length_mean": 2.5,  # (1 + 2 + 3 + 4) / 4
            "completion/length_min": 1,
            # Percentile p lies at place 3 p / 100 of the four.
            "completion/length_p10": 1.3,
            "completion/length_p25": 1.75,
            "completion/length_p50": 2.5,
            "completion/length_p75": 3.25,
            "completion/length_p90": 3.7,
            "completion/length_max": 4,
            "completion/truncated_fraction": 0.25,
            "reward/verifier_errors": 1,
            "reward/verifier_timeouts": 2,
            "reward/verifier_over_budget": 3,
            "reward/no_answer_fraction": 0.25,
        }
    )
    assert metrics.keys() <= METRICS.keys()

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.engines.sidecar.open_rows import OpenRows
from dcmdp_jax.engines.sidecar.replies import Completion
from dcmdp_jax.engines.sidecar.seeds import request_seeds


def test_hand_checked_values():
    # SeedSequence([3, 5, 7]) begins with the 32-bit words 0x08603933 and 0xdf796e1d. Low word first they are the
    # 64-bit word 0xdf796e1d08603933; halved: 0x6fbcb70e84301c99. Not shifted it would not fit in an int64.
    assert request_seeds(3, 5, [7]).tolist() == [0x6FBCB70E84301C99]
    assert 0xDF796E1D08603933 // 2 == 0x6FBCB70E84301C99 and 0xDF796E1D08603933 >= 2**63
    words = np.random.SeedSequence([3, 5, 7]).generate_state(2, np.uint32)
    assert [hex(word) for word in words.tolist()] == ["0x8603933", "0xdf796e1d"]


def test_a_row_has_its_seed_whatever_else_is_asked_for():
    together = request_seeds(1, 2, range(50))
    assert together.shape == (50,) and together.dtype == np.int64
    assert request_seeds(1, 2, [49, 7]).tolist() == [together[49], together[7]]
    assert request_seeds(1, 2, np.arange(50, dtype=np.int32)).tolist() == together.tolist()
    assert request_seeds(1, 2, []).shape == (0,)


def test_seeds_are_distinct_and_in_range():
    # Sums and products of the three would give the same for many of these.
    seeds = np.concatenate([request_seeds(seed, step, range(100)) for seed in range(10) for step in range(10)])
    assert np.unique(seeds).size == 10_000
    # vLLM's CPU build sees the low 32 bits. Of 10,000 even draws from 2^32 about 0.01 pairs agree.
    assert np.unique(seeds & 0xFFFFFFFF).size == 10_000
    assert seeds.min() >= 0
    # All 63 bits are used: each is set in half of them, 5000 +- 50.
    share = [(seeds >> bit & 1).mean() for bit in range(63)]
    assert min(share) > 0.47 and max(share) < 0.53


def test_the_rest_of_a_cut_completion_has_draws_and_limits_of_its_own():
    """Rows 0 and 1 of prompt 4, whose first number is 10: one has ended, one was cut after two tokens."""
    open_rows = OpenRows({4: np.array([7, 8])}, SamplingParams(2, 6), seed=3, step=5, first_prompt=10)
    assert open_rows.request(cut=True)["seeds"].tolist() == request_seeds(3, 5, [28, 29]).tolist()
    found = [
        Completion(0, np.array([1], np.int32), np.zeros(1, np.float32), "stop"),
        Completion(1, np.array([5, 6], np.int32), np.zeros(2, np.float32), "cut"),
    ]
    assert open_rows.add([0, 1], found, [{}, {}], 3) == [] and open_rows.rows == [1]
    again = open_rows.request(cut=True)
    word = np.random.SeedSequence([3, 5, 29, 2]).generate_state(1, np.uint64)[0]
    assert again["seeds"].tolist() == [int(word) >> 1] != request_seeds(3, 5, [29]).tolist()
    assert (again["prompt_ids"].tolist(), again["limits"].tolist()) == ([7, 8, 5, 6], [4])
    rest = Completion(0, np.array([9], np.int32), np.zeros(1, np.float32), "stop")
    first, second = open_rows.add([1], [rest], [{}], 4)
    assert first.policy_versions[first.sampled_mask].tolist() == [3]
    assert second.completion_ids.tolist() == [5, 6, 9]
    assert second.policy_versions[second.sampled_mask].tolist() == [3, 3, 4]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [((-1, 0, [0]), "seed: got -1"), ((0, 2**32, [0]), "step: got 4294967296"), ((0, 0, [0, -3]), "row: got -3")],
)
def test_numbers_out_of_range_are_refused(numbers, named):
    with pytest.raises(ValueError, match=f"^{named}, must be in 0 .. 2\\^32 - 1$"):
        request_seeds(*numbers)

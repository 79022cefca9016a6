import numpy as np
import pytest

from dcmdp_jax.engines.vllm_common import request_seeds


def test_hand_checked_values():
    # SeedSequence([3, 5, 7]) begins with the 32-bit words 0x08603933 and 0xdf796e1d. Low word first
    # they are the 64-bit word 0xdf796e1d08603933; halved: 0x6fbcb70e84301c99. Not shifted it would
    # not fit in an int64.
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
    seeds = np.concatenate(
        [request_seeds(seed, step, range(100)) for seed in range(10) for step in range(10)]
    )
    assert np.unique(seeds).size == 10_000
    # vLLM's CPU build sees the low 32 bits. Of 10,000 even draws from 2^32 about 0.01 pairs agree.
    assert np.unique(seeds & 0xFFFFFFFF).size == 10_000
    assert seeds.min() >= 0
    # All 63 bits are used: each is set in half of them, 5000 +- 50.
    share = [(seeds >> bit & 1).mean() for bit in range(63)]
    assert min(share) > 0.47 and max(share) < 0.53


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ((-1, 0, [0]), "seed: got -1"),
        ((0, 2**32, [0]), "step: got 4294967296"),
        ((0, 0, [0, -3]), "row: got -3"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, named):
    with pytest.raises(ValueError, match=f"^{named}, must be in 0 .. 2\\^32 - 1$"):
        request_seeds(*numbers)

"""A saved model's run; sizes of an evaluation are multiplied before anything is allocated."""

import pytest

from dcmdp_jax.run.evaluation_setup import check_size


def test_a_task_is_refused_by_the_product_of_its_sizes():
    # The largest benchmark: 675 x 4 completions of 32,768 tokens at 8 bytes, and 1,000 each, are
    # 0.66 GiB.
    for free in (2**30, None):
        check_size("olympiadbench", 675, 4, 32768, free=free)
    # 500 x 64 x (32,768 x 8 + 1,000) = 8,420,608,000 bytes = 7.8 GiB.
    with pytest.raises(
        ValueError, match="samples: got 64; math500 has .* take 7.8 GiB, 4.0 GiB are free; lower"
    ):
        check_size("math500", 500, 64, 32768, free=4 * 2**30)
    with pytest.raises(
        ValueError,
        match="30,000,000,000 completions of up to 1 tokens, which take 28,163.2 GiB, 4.0",
    ):
        check_size("aime24", 30, 10**9, 1, free=4 * 2**30)

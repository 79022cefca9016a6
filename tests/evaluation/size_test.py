"""Sizes of an evaluation, multiplied before anything is allocated."""

import pytest

from dcmdp_jax.evaluation.size import check_size


def test_what_fits_is_let_through():
    # The largest benchmark: 675 x 4 completions of 32,768 tokens at 8 bytes are 0.66 GiB.
    check_size("olympiadbench", 675, 4, 32768, free=2**30)
    check_size("olympiadbench", 675, 4, 32768, free=None)


def test_tokens_are_multiplied_and_the_product_is_said():
    # 500 x 64 x 32,768 x 8 = 8,388,608,000 bytes = 7.8 GiB.
    with pytest.raises(ValueError) as caught:
        check_size("math500", 500, 64, 32768, free=4 * 2**30)
    assert str(caught.value) == (
        "--samples: got 64; math500 has 500 problems x 64 samples = 32,000 completions of up to 32,768 tokens take 7.8 "
        "GiB, 4.0 GiB are free; lower --samples, --max_problems or --max_completion_tokens"
    )


@pytest.mark.parametrize("samples", [10**9, 2**31 - 1])
def test_completions_have_a_limit_of_their_own(samples):
    with pytest.raises(ValueError, match="the most are 10,000,000; lower --samples or --max_problems"):
        check_size("aime24", 30, samples, 1, free=None)
    check_size("aime24", 10, 10**6, 1, free=None)

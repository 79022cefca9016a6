"""Messages of errors are cut where a reader can still read them."""

from dcmdp_jax.errors import one_line


def test_a_long_message_is_cut_between_words():
    assert one_line("the Hub\n refused  it", 11) == "the Hub..."
    assert one_line("the Hub refused", 15) == one_line("the Hub refused") == "the Hub refused"
    # The limit is the end of a word.
    assert one_line("the Hub refused it", 15) == "the Hub refused..."
    assert one_line("x" * 9, 4) == "xxxx..."

"""The line that a refusal says."""

import pytest


def refused(call, *arguments, **options):
    """The message of the ValueError that a call raises: one line."""
    with pytest.raises(ValueError) as raised:
        call(*arguments, **options)
    line = str(raised.value)
    assert "\n" not in line
    return line

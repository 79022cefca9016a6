"""What the program itself logged: no test may take a library's silence for success, or its words
for ours.
"""

import logging

import pytest


def our_log(caplog: pytest.LogCaptureFixture, level: int = logging.NOTSET) -> list[str]:
    """Messages of this program's loggers from `level` on, in order."""
    ours = (
        record for record in caplog.records if record.name.partition(".")[0] in ("dcmdp_jax", "bin")
    )
    return [record.getMessage() for record in ours if record.levelno >= level]

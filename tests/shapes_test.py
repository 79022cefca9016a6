"""The shapes of signatures are checked in the tests, and nowhere else."""

import importlib
import subprocess
import sys

import jaxtyping
import numpy as np
import pytest

from dcmdp_jax.algorithm.stats import exp_minus_linear

_PLANTED = """
from __future__ import annotations

import numpy as np
from jaxtyping import Float


def row_sums(values: Float[np.ndarray, "R L"], axis: int = 1) -> Float[np.ndarray, " R"]:
    if values.ndim > 2:
        raise ValueError("values has three axes")
    return values.sum(axis=axis)
"""


def test_a_wrong_shape_is_refused_after_the_functions_own_checks(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(_PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    with jaxtyping.install_import_hook("planted", "tests.support.shapes.after_the_call"):
        planted = importlib.import_module("planted")
    assert planted.row_sums(np.ones((2, 3))).tolist() == [3, 3]
    with pytest.raises(jaxtyping.TypeCheckError, match="row_sums"):
        planted.row_sums(np.ones((2, 3)), axis=0)  # sums of columns: three, of two rows
    with pytest.raises(jaxtyping.TypeCheckError, match="row_sums"):
        planted.row_sums(np.ones((2, 3), int))
    with pytest.raises(ValueError, match="three axes"):
        planted.row_sums(np.ones((2, 3, 4)))


def test_the_algorithm_is_checked_here_and_not_in_a_run():
    with pytest.raises(jaxtyping.TypeCheckError, match="exp_minus_linear"):
        exp_minus_linear(np.ones(2, int))
    code = (
        "import sys, numpy, dcmdp_jax, dcmdp_jax.training.step; from dcmdp_jax.algorithm import "
        "stats;assert not [one for one in sys.meta_path if "
        "type(one).__module__.startswith('jaxtyping')];assert 'beartype' not in sys.modules and "
        "not hasattr(stats.exp_minus_linear, '__wrapped__');stats.exp_minus_linear(numpy.ones(2, "
        "int))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

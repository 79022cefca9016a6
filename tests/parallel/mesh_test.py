"""Mesh sizes and what wrong ones get."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from dcmdp_jax.parallel.mesh import check_training_mesh, make_mesh
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 1, 1), (8, 1, 1, 1)),
        ((-1, 1, 1), (8, 1, 1, 1)),
        ((2, -1, 2), (2, 2, 2, 1)),
        ((1, 4, -1), (1, 4, 2, 1)),
        ((2, 4, -1), (2, 4, 1, 1)),
        ((1, 2, 1, -1), (1, 2, 1, 4)),
    ],
)
def test_sizes(sizes, expected):
    mesh = make_mesh(*sizes, devices=jax.devices()[:8])
    assert mesh.axis_names == ("data", "fsdp", "tensor", "expert")
    assert mesh.devices.shape == expected
    assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
    assert mesh.axis_types == (AxisType.Auto,) * 4


def test_devices():
    assert make_mesh(-1).devices.size == len(jax.devices())
    chosen = jax.devices()[2:4]
    assert set(np.ravel(make_mesh(1, 2, 1, devices=chosen).devices)) == set(chosen)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"fsdp": 3},
            "mesh (data=1, fsdp=3, tensor=1, expert=1): needs 3 devices, there are 8; set one "
            "axis to -1 to fit",
        ),
        (
            {},
            "mesh (data=1, fsdp=1, tensor=1, expert=1): needs 1 devices, there are 8; set one "
            "axis to -1 to fit",
        ),
        (
            {"data": 4, "tensor": 4},
            "mesh (data=4, fsdp=1, tensor=4, expert=1): needs 16 devices, there are 8; set one "
            "axis to -1 to fit",
        ),
        (
            {"data": -1, "fsdp": 3},
            "mesh (data=-1, fsdp=3, tensor=1, expert=1): 3 does not divide the 8 devices; that do "
            "1, 2, 4, 8",
        ),
        (
            {"data": -1, "fsdp": -1},
            "mesh (data=-1, fsdp=-1, tensor=1, expert=1): only one axis may be -1",
        ),
        ({"data": 0}, "data: got 0, must be at least 1, or -1 for the devices left over"),
        ({"tensor": -2}, "tensor: got -2, must be at least 1, or -1 for the devices left over"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    assert refused(make_mesh, **sizes, devices=jax.devices()[:8]) == message


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (1, 1, 8, 1),
            "tensor: got 8, must divide the model's 12 query heads; that do 1, 2, 3, 4, 6, 12",
        ),
        ((1, 1, 1, 8), "expert: got 8, must divide the model's 6 experts; that do 1, 2, 3, 6"),
        (
            (1, 8, 1, 1),
            "mesh: data x fsdp x expert = 8 devices split the rows of a mini-batch, which has 7 "
            "completions; use at most that many and `tensor` for the rest, or raise `completions`",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_or_the_batch(sizes, message):
    mesh = make_mesh(*sizes, devices=jax.devices()[:8])
    assert refused(check_training_mesh, mesh, num_heads=12, num_experts=6, completions=7) == message

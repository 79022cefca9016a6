"""Nested values by dotted names."""

import pytest

from dcmdp_jax.dotted_names import flatten, replace_value


def test_a_value_is_replaced_by_its_dotted_name():
    values = {"inner": {"size": 4}}
    replace_value(values, "inner.size", 5)
    replace_value(values, "other.deep.name", 6)
    assert flatten(values) == {"inner.size": 5, "other.deep.name": 6}
    with pytest.raises(ValueError, match=r"^config\.inner\.size\.x: size is 5, must be a section$"):
        replace_value(values, "inner.size.x", 1)

"""The devices and fixtures of tests/conftest.py."""

from tests.conftest import _few_programs, pytest_collection_modifyitems, run_environment  # noqa: F401

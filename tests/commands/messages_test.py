"""Messages of mistakes in arguments and in a config.json, against tests/recorded/messages.txt."""

import re

import pytest

from dcmdp_jax.commands import plan
from dcmdp_jax.config.settings import setting_names
from tests.support.each import check_each
from tests.support.messages import ROOT, recorded, said


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    """Config files are named from the repository's root, and no compiler is asked for."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan, "load_topology", lambda name: pytest.fail("asked for a compiler"))


def test_messages_are_those_recorded():
    """After a change of words: `python -m tests.support.messages`, and read the difference."""

    def check(command, message):
        assert said(command) == message

    check_each(recorded().items(), check)


def test_a_message_begins_with_a_setting_an_argument_or_names_a_field():
    known = {"config", "--config", "--topology", *(f"config.{name}" for name in setting_names())}

    def check(command, message):
        if command.startswith("config.json"):
            fields = re.findall(r'"(\w+)"', command)
            assert message.startswith("config.json: ") and any(
                field in message for field in fields
            ), message
            return
        name = re.match(r"(?:argument )?(--[\w-]+|config(?:\.\w+)*|\w+)", message)[1]
        # A section as a whole, or an argument that there is none of.
        assert (
            name in known or name in command or any(one.startswith(f"{name}.") for one in known)
        ), message

    check_each(recorded().items(), check)

"""What a mistake in the arguments of `dcmdp train` and `dcmdp plan` is told, against tests/recorded/messages.txt."""

import re
import shlex

import pytest

from dcmdp_jax.commands import plan
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


def test_a_message_names_what_is_wrong():
    """A setting or an argument that the command has, or the one that it lacks."""

    def check(command, message):
        words = [re.split("[= ]", word)[0].lstrip("-") for word in shlex.split(command)]
        names = {name for word in words for name in (word, word.rpartition(".")[2])} | {"--config", "--topology"}
        assert any(name in message for name in names - {"config", "train"}), message

    check_each(recorded().items(), check)

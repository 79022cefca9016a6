"""What the small commands print: env, completion, settings."""

import shutil
import subprocess

import jax
import pytest

from dcmdp_jax import __version__
from dcmdp_jax.commands import env, settings
from dcmdp_jax.config.text import settings_page
from dcmdp_jax.errors import UserError
from tests.support.waiting import HANGS_S


def test_env_has_versions_devices_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("JAX_TEST_ONLY", "7")
    monkeypatch.setenv("SECRET_KEY", "hidden")
    env.main(["env"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"dcmdp_jax        {__version__}")
    assert f"jax              {jax.__version__}" in lines and "JAX_TEST_ONLY=7" in lines
    assert any(line.startswith("devices ") and "cpu:0" in line for line in lines)
    assert not any("hidden" in line for line in lines)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_completion_completes_commands_presets_and_settings(capsys):
    settings.main(["settings", "--completion"])
    script = capsys.readouterr().out
    for word, found in (("pro", "probe"), ("--config=demo_m", "--config=demo_moe")):
        ask = (
            'eval "$(complete -p dcmdp | sed "s/^complete/compgen/; s/ -o [a-z]*//g; s/ '
            f'dcmdp$//")" -- {word}'
        )
        done = subprocess.run(
            ["bash", "-c", script + ask], capture_output=True, text=True, timeout=HANGS_S
        )
        assert done.stdout.split() == [found], done.stderr
    assert (
        "--config.training.steps= " in script
        and 'COMP_WORDBREAKS="${COMP_WORDBREAKS//=}"' in script
    )


def test_settings_are_markdown_in_a_file_and_text_with_a_word(capsys):
    settings.main(["settings"])
    assert capsys.readouterr().out == settings_page()
    settings.main(["settings", "lr"])
    assert capsys.readouterr().out == (
        "--config.optimizer.learning_rate=1e-06    # at least 0\n    Learning rate of AdamW.\n"
    )
    settings.main(["settings", "rollout.gro"])
    assert capsys.readouterr().out.startswith(
        "--config.rollout.group_size=8    # at least 2 completions\n    G,"
    )
    with pytest.raises(UserError, match="config.nope: no such setting"):
        settings.main(["settings", "nope"])

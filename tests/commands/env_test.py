"""What the small commands print: env, completion, settings."""

import shutil
import subprocess

import jax
import pytest

from dcmdp_jax import __version__
from dcmdp_jax.commands import completion, env, settings
from dcmdp_jax.config.text import settings_page
from dcmdp_jax.errors import UserError


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
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["dcmdp", "pro"], "probe"),
        (["dcmdp", "train", "--config", "=", "demo_m"], "demo_moe"),
        (["dcmdp", "train", "--config.training.ste"], "--config.training.steps="),
    ],
)
def test_completion_completes_commands_presets_and_settings(words, found, capsys):
    completion.main(["completion"])
    listed = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _dcmdp; echo "${{COMPREPLY[*]}}"'
    done = subprocess.run(["bash", "-c", capsys.readouterr().out + ask], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [found], done.stderr


def test_settings_are_markdown_in_a_file_and_text_with_a_word(capsys):
    settings.main(["settings"])
    assert capsys.readouterr().out == settings_page()
    settings.main(["settings", "lr"])
    assert capsys.readouterr().out == (
        "--config.optimizer.learning_rate=1e-06    # at least 0\n    Learning rate of AdamW.\n"
    )
    settings.main(["settings", "rollout.gro"])
    assert capsys.readouterr().out.startswith("--config.rollout.group_size=8    # at least 2 completions\n    G,")
    with pytest.raises(UserError, match="config.nope: no such setting"):
        settings.main(["settings", "nope"])

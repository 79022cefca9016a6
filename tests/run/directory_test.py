"""One run, one directory: who may write there and with which config."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from configs.base import get_config
from dcmdp_jax.config.load import VERSION, from_config_dict
from dcmdp_jax.config.settings import to_dict
from dcmdp_jax.errors import UserError
from dcmdp_jax.run.directory import check_run_directory, claimed, read_config, record_config
from tests.support.refusals import refused
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).resolve().parents[2]


def _config(run_dir, **changes):
    """The defaults at toy size with `section__name=value` changes."""
    config = get_config("debug")
    config.run_dir = str(run_dir)
    for dotted, value in changes.items():
        section, name = dotted.split("__")
        config[section][name] = value
    return from_config_dict(config)


@pytest.fixture
def run_dir(tmp_path):
    """A directory that a run has written to."""
    config = _config(tmp_path / "run")
    with claimed(config):
        record_config(config)
    return tmp_path / "run"


def test_a_check_makes_nothing(tmp_path):
    check_run_directory(_config(tmp_path / "a" / "b" / "c"))
    assert list(tmp_path.iterdir()) == []


def test_a_claim_makes_the_directory_and_binds_it_to_nothing(tmp_path):
    with claimed(_config(tmp_path / "run")):
        pass
    check_run_directory(_config(tmp_path / "run", training__seed=7))


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "tokenizer"])
def test_a_file_where_a_directory_belongs_is_named(run_dir, name):
    (run_dir / name).write_text("")
    with pytest.raises(
        ValueError, match=re.escape(f"config.run_dir: {run_dir / name} is no directory; move")
    ):
        check_run_directory(_config(run_dir))


@pytest.mark.parametrize("name", [".lock", "config.json", "error.log", "metrics.jsonl"])
def test_a_fifo_among_the_files_is_named_and_not_waited_for(run_dir, name):
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name)
    with pytest.raises(
        ValueError,
        match=re.escape(f"config.run_dir: {run_dir / name} is no file (a FIFO, socket or"),
    ):
        check_run_directory(_config(run_dir))


@pytest.mark.parametrize("path", ["/tmp/" + "d" * 256, "/d" * 1751, "/tmp/" + "\u00e9" * 128])
def test_a_directory_whose_name_is_too_long_is_refused(path):
    said = "is too long; choose one of at most 3,500 bytes, 255 between two slashes$"
    with pytest.raises(ValueError, match=f"^config.run_dir: '/.* {said}") as caught:
        check_run_directory(_config(path))
    assert len(str(caught.value)) < 300


def test_the_longest_name_is_taken(tmp_path):
    check_run_directory(_config(tmp_path / ("d" * 255)))


def test_the_record_is_the_config(tmp_path):
    config = _config(tmp_path / "a" / "run", training__row_lengths=(80, 96))
    with claimed(config) as path:
        record_config(config)
        assert path == tmp_path / "a" / "run"
        saved = json.loads((path / "config.json").read_text())
    record = {"config_version": VERSION, **to_dict(config)}
    record["algorithm"]["trust_region"] = (
        "clip(low=0.2,high=0.24,dual=0.0)"  # the numbers of `clip`
    )
    assert saved == record
    assert read_config(tmp_path / "a" / "run") == config
    assert sorted(file.name for file in path.iterdir()) == [".lock", "config.json"]


@pytest.mark.parametrize("below", ["run", "run/deeper"])
def test_a_directory_below_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    config = _config(tmp_path / "file" / below)
    with pytest.raises(
        OSError,
        match=re.escape(
            f"config.run_dir: {tmp_path}/file/{below} can't be written ({tmp_path}/file)"
        ),
    ):
        check_run_directory(config)
    with pytest.raises(
        OSError, match=r"^config\.run_dir: .* can't be written \(Not a directory\); choose another$"
    ):
        claimed(config).__enter__()


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(
        OSError,
        match=re.escape(f"config.run_dir: {tmp_path}/run can't be written ({tmp_path}/run)"),
    ):
        check_run_directory(_config(tmp_path / "run"))


def test_a_second_process_is_refused_and_may_come_when_the_first_has_left(run_dir):
    program = (
        "import sys; from pathlib import Path; from dcmdp_jax.run.directory import claimed, "
        "read_config; context = claimed(read_config(Path(sys.argv[1]))); context.__enter__(); "
        "print('claimed', flush=True); sys.stdin.readline()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(run_dir)],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "claimed\n"
        line = refused(claimed(_config(run_dir)).__enter__)
        assert line == f"config.run_dir: another process is running in {run_dir}; choose another"
    finally:
        # Killed, not asked: the lock must go with the process.
        other.kill()
        other.communicate()
    with claimed(_config(run_dir)):
        pass


def test_the_lock_is_given_back_after_an_error(run_dir):
    with pytest.raises(RuntimeError, match="stop"), claimed(_config(run_dir)):
        raise RuntimeError("stop")
    with claimed(_config(run_dir)):
        pass


def test_the_same_config_resumes(run_dir):
    check_run_directory(_config(run_dir))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("algorithm.tolerance", 0.0037, 0.005),
        ("algorithm.method", "dc_grpo", "grpo"),
        ("rollout.precision", "bfloat16", "fp8"),
        ("training.seed", 0, 1),
        ("training.prompts_per_mini_batch", 2, 4),
        ("task.max_prompt_tokens", 64, 48),
        ("task.verifier_timeout", 5.0, 9.0),
        ("optimizer.learning_rate", 1e-6, 2e-6),
        ("model.param_dtype", "float32", "bfloat16"),
    ],
)
def test_another_config_is_refused_and_the_setting_named(run_dir, name, before, after):
    value = tuple(after) if isinstance(after, list) else after
    assert refused(check_run_directory, _config(run_dir, **{name.replace(".", "__"): value})) == (
        f"config.run_dir: {run_dir} holds a run with {name}={before!r}, this config has "
        f"{after!r}; choose another run_dir, or delete that one"
    )


def test_what_does_not_change_what_is_learned_may_change(run_dir):
    rows = dict(micro_batch_tokens=160, row_lengths=(96,), segments_per_row=2, steps=99)
    changed = {f"training__{name}": value for name, value in rows.items()}
    changed |= dict(
        rollout__max_rows=2, rollout__on_non_finite="drop", evaluation__samples=(3,), mesh__fsdp=1
    )
    changed |= dict(checkpoint__every_steps=3, observe__samples=9, task__verifier_workers=7)
    check_run_directory(_config(run_dir, **changed))


def test_a_run_may_be_moved(run_dir, tmp_path):
    run_dir.rename(tmp_path / "elsewhere")
    check_run_directory(_config(tmp_path / "elsewhere"))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_number_of_steps_is_fixed_where_the_learning_rate_ends_with_it(tmp_path, schedule):
    config = _config(tmp_path / "run", optimizer__schedule=schedule)
    with claimed(config):
        record_config(config)
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, steps=99))
    with pytest.raises(ValueError, match=r"holds a run with training\.steps=2, this config has 99"):
        check_run_directory(longer)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe{}"])
def test_a_config_that_can_not_be_read_is_named(run_dir, content):
    (run_dir / "config.json").write_bytes(content)
    with pytest.raises(ValueError) as raised:
        check_run_directory(_config(run_dir))
    assert str(raised.value).startswith(f"{run_dir}/config.json: can't be read (")


def _save(run_dir, change):
    """Change the saved config of a run, as another version would have written it."""
    saved = json.loads((run_dir / "config.json").read_text())
    change(saved)
    (run_dir / "config.json").write_text(json.dumps(saved))


def test_a_run_that_lacks_a_setting_has_its_default(run_dir):
    _save(run_dir, lambda saved: saved["algorithm"].pop("sided"))
    check_run_directory(_config(run_dir))
    with pytest.raises(
        ValueError, match=r"holds a run with algorithm\.sided='two', this config has 'one'"
    ):
        check_run_directory(_config(run_dir, algorithm__sided="one"))


def test_a_run_that_lacks_a_whole_section_has_its_defaults(run_dir):
    _save(run_dir, lambda saved: saved.pop("optimizer"))
    check_run_directory(_config(run_dir))


def test_a_run_without_a_version_is_read(run_dir):
    _save(run_dir, lambda saved: saved.pop("config_version"))
    check_run_directory(_config(run_dir))


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        (
            "config_version",
            VERSION + 1,
            f"config_version: got {VERSION + 1}, this program knows versions up to {VERSION}",
        ),
        ("config_version", "new", "config_version: got 'new', this program knows"),
        ("multplier", 1, "config.multplier: no such setting; did you mean 'algorithm.multiplier'?"),
        (
            "rollout",
            {"engine": "sglang"},
            "config.rollout.engine: got 'sglang', allowed are local, vllm",
        ),
        ("algorithm", 3, "config.algorithm: got 3, must be a section with named settings"),
    ],
)
def test_what_this_version_does_not_know_is_named(run_dir, name, value, line):
    _save(run_dir, lambda saved: saved.update({name: value}))
    with pytest.raises(
        ValueError, match=re.escape(f"{run_dir}/config.json: can't be read ({line}")
    ):
        check_run_directory(_config(run_dir))


def test_a_run_whose_values_are_refused_today_is_read(run_dir):
    _save(run_dir, lambda saved: saved["algorithm"].update(kl_estimator="k1"))
    assert read_config(run_dir).algorithm.kl_estimator == "k1"


def test_a_name_that_is_no_utf8_is_refused():
    with pytest.raises(
        ValueError, match=r"^config.run_dir: 'r\\udcc3n' is no UTF-8; set LC_ALL=C.UTF-8"
    ):
        check_run_directory(_config("r\udcc3n"))


def test_a_config_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    said = []

    def read():
        try:
            read_config(tmp_path)
        except UserError as error:
            said.append(str(error))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert said == [f"{tmp_path}/config.json: can't be read (a FIFO)"]

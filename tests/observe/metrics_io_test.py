"""The writer: exact values, each line on disk when the call returns, one line a step through kills
and resumes.
"""

import contextlib
import json
import math
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from dcmdp_jax.errors import UserError
from dcmdp_jax.observe import metrics_io
from dcmdp_jax.observe.metrics_io import MetricsWriter, has_record, read_metrics
from dcmdp_jax.training.giving_up import AlarmWatch, SkippedUpdates
from tests.support.our_log import our_log
from tests.support.waiting import HANGS_S

_ROOT = Path(__file__).parents[2]


def _lines(run_dir, name="metrics.jsonl"):
    lines = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
    for line in lines:
        line.pop("time/clock", None)
    return lines


def test_a_line_has_the_clock_of_its_write(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_io.time, "time", lambda: 1_795_824_000.12345)
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"reward/mean": 0.25})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "reward/mean": 0.25, "time/clock": 1_795_824_000.123}


def _events(run_dir):
    """Every TensorBoard event, by the record framing: length, its checksum, data, its checksum."""
    events = []
    for path in sorted(
        (run_dir / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns
    ):
        data = path.read_bytes()
        place = 0
        while place < len(data):
            (length,) = struct.unpack_from("<Q", data, place)
            events.append(event_pb2.Event.FromString(data[place + 12 : place + 12 + length]))
            place += 16 + length
    return events


def test_a_line_is_on_disk_when_write_returns(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"reward/mean": jnp.float32(0.25)})
        assert _lines(tmp_path) == [{"step": 1, "reward/mean": 0.25}]
        writer.write(1, {"eval/arithmetic/avg@8": 0.5})
        assert _lines(tmp_path)[1:] == [{"step": 1, "eval/arithmetic/avg@8": 0.5}]
        writer.write(2, {"reward/mean": 0.75})
        assert _lines(tmp_path)[2:] == [{"step": 2, "reward/mean": 0.75}]
    assert len(_lines(tmp_path)) == 3
    writer.close()


def test_values_of_every_kind_are_exact_and_keep_their_order(tmp_path):
    third = np.float32(1) / np.float32(3)
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(
            7,
            {
                "z/float32": jnp.float32(third),
                "y/bfloat16": jnp.bfloat16(0.15625),
                "x/int": jnp.int32(3),
                "w/numpy": np.float64(0.1),
                "v/array": np.array(2.5, np.float32),
                "u/python": 4,
                "t/nan": jnp.float32(math.nan),
                "s/inf": -math.inf,
            },
        )
    text = re.sub(r', "time/clock": [0-9.]+', "", (tmp_path / "metrics.jsonl").read_text())
    # float32 1/3 is 11184811 / 2^25.
    assert text == (
        f'{{"step": 7, "z/float32": {11184811 / 2**25!r}, "y/bfloat16": 0.15625, "x/int": 3, "w/numpy": 0.1, '
        '"v/array": 2.5, "u/python": 4, "t/nan": "NaN", "s/inf": "-Infinity"}\n'
    )
    series = read_metrics(tmp_path)
    assert np.float32(series["z/float32"][1][0]) == third
    assert math.isnan(series["t/nan"][1][0]) and series["s/inf"][1][0] == -math.inf


def test_listener_gets_host_values_when_the_line_is_written(tmp_path):
    seen = []
    with contextlib.closing(
        MetricsWriter(tmp_path, listener=lambda step, values: seen.append((step, dict(values))))
    ) as writer:
        writer.write(1, {"a": jnp.float32(0.5)})
        assert seen == [(1, {"a": 0.5})]
        assert type(seen[0][1]["a"]) is float
        writer.write(2, {"a": jnp.float32(0.75)})
    assert seen == [(1, {"a": 0.5}), (2, {"a": 0.75})]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (np.zeros(1), "array([0.])"),
        (jnp.zeros(2), "array([0., 0.], dtype=float32)"),
        ("0.5", "'0.5'"),
        (None, "None"),
        ([0.5], "[0.5]"),
        (np.array("x"), "array('x', dtype='<U1')"),
        (1j, "1j"),
    ],
)
def test_a_value_that_is_no_scalar_is_named(tmp_path, value, shown):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer, pytest.raises(ValueError) as error:
        writer.write(1, {"reward/mean": value})
    assert str(error.value).startswith(
        f"metric reward/mean is {shown}; allowed: a number or an array of shape []"
    )


def test_misuse_is_refused(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(3, {"a": 1.0})
    with pytest.raises(ValueError, match="metrics of step 2 came after step 3"):
        writer.write(2, {"a": 1.0})
    with pytest.raises(ValueError, match='metric step is 1.0; .* not "step"'):
        writer.write(4, {"step": 1.0})
    writer.close()
    with pytest.raises(ValueError, match=r"metrics.jsonl: step 5 came after close"):
        writer.write(5, {"a": 1.0})
    with pytest.raises(ValueError, match=r"samples.jsonl: step 5 came after close"):
        writer.write_samples(5, [])


def test_a_resumed_run_has_every_step_once(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": step / 8})
            writer.write_samples(step, [{"prompt": "p", "reward": 0.0}])
    with contextlib.closing(MetricsWriter(tmp_path, resume_step=3)) as writer:
        for step in (4, 5, 6):
            writer.write(step, {"reward/mean": step / 8 + 100})
            writer.write_samples(step, [{"prompt": "q", "reward": 1.0}])
    steps, values = read_metrics(tmp_path)["reward/mean"]
    assert [line["step"] for line in _lines(tmp_path)] == steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert values.tolist() == [0.125, 0.25, 0.375, 100.5, 100.625, 100.75]
    samples = _lines(tmp_path, "samples.jsonl")
    assert [(record["step"], record["prompt"]) for record in samples] == [
        *((1, "p"), (2, "p"), (3, "p")),
        *((4, "q"), (5, "q"), (6, "q")),
    ]


@pytest.mark.parametrize(
    "damage",
    [b"", b'{"step": 4, "rew', b"\xff\xfe{\n", b'{"step": 2, "alarm": "x"}\n', b"3\n", b"[" * 9999],
)
def test_no_damaged_line_stops_a_run_from_resuming(tmp_path, damage):
    """What every file of lines holds when it is opened again is whole: readers at start, report and
    view read it.
    """
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step / 4, "optimizer/skipped_updates": step})
            writer.write_samples(step, [{"prompt": "p"}])
            writer.write_held_out(step, [{"task": "t", "place": 0}])
    names = "metrics.jsonl", "samples.jsonl", "held_out_samples.jsonl", "starts.jsonl"
    for name in names:
        first, *rest = (tmp_path / name).read_bytes().splitlines(keepends=True)
        (tmp_path / name).write_bytes(first + damage + b"".join(rest) + damage)
    # A host other than the first reads what the first may not have mended yet.
    assert has_record(tmp_path, 1, "reward/") and not has_record(tmp_path, 1, "eval/")
    AlarmWatch(str(tmp_path), 3, stops=False, measured_steps=0)
    skipped = SkippedUpdates(str(tmp_path), 3, updates=4)
    recorded = skipped.record(4, {"optimizer/skipped_updates": 0})
    MetricsWriter(tmp_path, resume_step=3).close()
    known = sum(read_metrics(tmp_path)["optimizer/skipped_updates"][1])
    assert known == (
        6 if damage.endswith(b"\n") or not damage else 4
    )  # a torn line takes the next with it
    counted = 3 if known == 6 else 2
    assert recorded == {"optimizer/skipped_share": pytest.approx(known / (4 * (counted + 1)))}
    for name in names:
        assert all(
            json.loads(line).keys() >= {"step"}
            for line in (tmp_path / name).read_text().splitlines()
        )
    assert "command" in _lines(tmp_path, "starts.jsonl")[-1]


def test_held_out_completions_of_a_step_that_is_evaluated_again_are_there_once(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        for step in (0, 2):
            writer.write_held_out(step, [{"task": "t", "place": place} for place in range(8)])
    with contextlib.closing(MetricsWriter(tmp_path, resume_step=2)) as writer:
        writer.write_held_out(2, [{"task": "u", "place": place} for place in range(8)])
    read = [
        (record["step"], record["task"], record["place"])
        for record in _lines(tmp_path, "held_out_samples.jsonl")
    ]
    assert read == [
        *((0, "t", place) for place in range(8)),
        *((2, "u", place) for place in range(8)),
    ]


def test_tensorboard_gets_the_scalars_and_hides_repeated_steps(tmp_path):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"reward/mean": 0.25, "policy/ratio_max": math.inf})
        writer.write(2, {"reward/mean": 0.5})
    with contextlib.closing(MetricsWriter(tmp_path, resume_step=1)) as writer:
        writer.write(2, {"reward/mean": 0.75})
    events = _events(tmp_path)
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events
        for value in event.summary.value
    ]
    assert scalars == [(1, "reward/mean", 0.25), (2, "reward/mean", 0.5), (2, "reward/mean", 0.75)]
    # A session start at step s makes TensorBoard forget earlier files' events from step s on.
    starts = [
        event.step for event in events if event.session_log.status == event_pb2.SessionLog.START
    ]
    assert starts == [0, 2]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_new_run_moves_old_files(tmp_path, caplog):
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"a": 1.0})
    with contextlib.closing(MetricsWriter(tmp_path)) as writer:
        writer.write(1, {"a": 2.0})
    assert _lines(tmp_path) == [{"step": 1, "a": 2.0}]
    assert _lines(tmp_path, "metrics.jsonl.previous") == [{"step": 1, "a": 1.0}]
    assert "metrics.jsonl is now metrics.jsonl.previous" in caplog.text


def test_kill_in_the_middle_of_a_line_then_resume(tmp_path):
    program = f"""
import os, signal
from dcmdp_jax.observe import metrics_io
from dcmdp_jax.observe.metrics_io import MetricsWriter
writer = MetricsWriter({str(tmp_path)!r})
for step in (1, 2, 3):
    writer.write(step, {{"reward/mean": step / 4}})
    writer.write_samples(step, [{{"prompt": "p"}}])
for name in ("metrics.jsonl", "samples.jsonl"):
    file = open(os.path.join({str(tmp_path)!r}, name), "a")
    file.write('{{"step": 4, "reward/mean": 0.')
    file.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert read_metrics(tmp_path)["reward/mean"][0].tolist() == [1, 2, 3]
    with contextlib.closing(MetricsWriter(tmp_path, resume_step=2)) as writer:
        writer.write(3, {"reward/mean": 0.75})
        writer.write(4, {"reward/mean": 1.0})
    assert [(line["step"], line["reward/mean"]) for line in _lines(tmp_path)] == [
        *((1, 0.25), (2, 0.5)),
        *((3, 0.75), (4, 1.0)),
    ]
    assert [record["step"] for record in _lines(tmp_path, "samples.jsonl")] == [1, 2]


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError,
        match=r"run directory .*file/run can't be written \(Not a directory\); choose another",
    ):
        MetricsWriter(tmp_path / "file" / "run")


@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_a_tracker_not_installed_is_one_line_and_touches_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(
        ValueError, match=rf"{kind}_project is 'p' .* pip install 'PATH_OF_A_CHECKOUT\[{kind}\]'$"
    ):
        MetricsWriter(tmp_path / "run", projects={kind: "p"})
    assert not (tmp_path / "run").exists()


_SAMPLES = [
    {
        "prompt": "1+1?",
        "completion": "2",
        "answer": "2",
        "reward": 1.0,
        "source": "a",
        "discrepancy_mean": 0.25,
    },
    {
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": "5",
        "answer": None,
        "reward": 0.0,
    },
]


def test_wandb_offline_keeps_one_run_and_its_samples_through_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the wandb extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with contextlib.closing(MetricsWriter(tmp_path, projects={"wandb": "p"})) as writer:
        writer.write(1, {"a": 0.5})
        [tracker] = writer._trackers
        identity = tracker.run.id
    with contextlib.closing(
        MetricsWriter(tmp_path, projects={"wandb": "p"}, resume_step=1)
    ) as writer:
        writer.write(2, {"a": 0.75})
        writer.write_samples(2, _SAMPLES)
        [tracker] = writer._trackers
        assert tracker.run.id == identity
        assert (tracker.run.summary["a"], tracker.run.summary["step"]) == (0.75, 2)
    [table] = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    table = json.loads(table.read_text())
    assert table["columns"][:4] == ["step", "prompt", "completion", "answer"]
    assert table["data"][0] == [2, "1+1?", "2", "2", 1.0, "a", 0.25]
    assert table["data"][1] == [
        2,
        '[{"role": "user", "content": "2+2?"}]',
        "5",
        None,
        0.0,
        None,
        None,
    ]


def test_trackio_keeps_one_local_run_and_its_samples_through_a_resume(tmp_path):
    pytest.importorskip("trackio", reason="needs the trackio extra")
    script = (
        "import contextlib, json, sys\nfrom dcmdp_jax.observe.metrics_io import "
        "MetricsWriter\nrun, samples = sys.argv[1], json.loads(sys.argv[2])\nwith "
        "contextlib.closing(MetricsWriter(run, projects={'trackio': 'p'})) as writer:\n    "
        "writer.write(1, {'a': 0.5, 'b': float('nan')})\nwith "
        "contextlib.closing(MetricsWriter(run, projects={'trackio': 'p'}, resume_step=1)) as "
        "writer:\n    writer.write(2, {'a': 0.75})\n    writer.write_samples(2, samples)\n"
    )
    # A process of its own: the place of its data base is read at import.
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    run = tmp_path / "mine"
    done = subprocess.run(
        [sys.executable, "-c", script, run, json.dumps(_SAMPLES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [base] = (tmp_path / "trackio").glob("p*.db")
    with contextlib.closing(sqlite3.connect(base)) as rows:
        found = rows.execute("select run_name, step, metrics from metrics order by id").fetchall()
    name = f"mine-{(run / 'trackio_run_id').read_text()[:8]}"
    assert {row[0] for row in found} == {name}
    logged = [(step, json.loads(metrics)) for _, step, metrics in found]
    assert [(step, values["a"]) for step, values in logged if "a" in values] == [
        (1, 0.5),
        (2, 0.75),
    ]
    [(step, table)] = [(step, values["samples"]) for step, values in logged if "samples" in values]
    assert (
        step == 2 and table["_value"][0]["prompt"] == "1+1?" and table["_value"][1]["reward"] == 0.0
    )


def test_read_merges_lines_of_a_step_and_sorts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "a": 2.0}\n{"step": 0, "b": 7}\n{"step": 1, "a": 1.0, "c": null}\n'
        '{"step": 2, "a": 5, "b": 8}\n{"st'
    )
    series = read_metrics(tmp_path)
    assert {
        name: (steps.tolist(), values.tolist())
        for name, (steps, values) in series.items()
        if name != "c"
    } == {
        "a": ([1, 2], [1.0, 5.0]),
        "b": ([0, 2], [7.0, 8.0]),
    }
    assert series["c"][0].tolist() == [1] and math.isnan(series["c"][1][0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run directory: it holds no metrics.jsonl"),
        ("", "holds no metrics yet"),
        ('{"step": 1', "holds no metrics yet"),
        ('{"reward/mean": 1.0}\n', 'record 1: "step" is None; allowed: a whole number'),
        ('{"step": 1, "a": "high"}\n', "record 1: a is 'high'; allowed: a number"),
        ('{"step": 1, "a": [1]}\n', r"record 1: a is \[1\]; allowed: a number"),
        (
            f'{{"step": 1, "a": 0}}\n{{"step": 2, "a": 1{"0" * 400}}}\n',
            r"record 2: a is 1000+\.\.\.0+; allowed: a number that float64 holds",
        ),
        (
            f'{{"step": 1{"0" * 400}, "a": 1}}\n',
            r'record 1: "step" is 1000+\.\.\.0+; allowed: a whole number of int64',
        ),
    ],
)
def test_read_names_the_bad_record(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_metrics(tmp_path)


def test_read_says_when_the_directory_is_missing_or_a_file(tmp_path):
    with pytest.raises(ValueError, match="absent is not a run directory: it does not exist"):
        read_metrics(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is not a run directory: a file"):
        read_metrics(tmp_path / "file")


def test_a_full_disk_under_tensorboard_does_not_hold_up_the_run(tmp_path, monkeypatch, caplog):
    writer = MetricsWriter(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    events = writer._tensorboard.file_writer.event_writer
    monkeypatch.setattr(events._ev_writer, "write_event", full)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    writer.write(1, {"reward/mean": 0.5})
    events._worker.join(timeout=HANGS_S)
    assert not events._worker.is_alive()
    for step in (2, 3):
        writer.write(step, {"reward/mean": 0.25 * step})
    writer.close()
    assert [record["reward/mean"] for record in _lines(tmp_path)] == [0.5, 0.5, 0.75]
    assert our_log(caplog) == [
        "TensorBoard's files can't be written (is the disk full?); going on without them"
    ]


def test_a_start_names_a_command_that_exists_and_the_devices_of_the_run(tmp_path, monkeypatch):
    for program, said in (
        (_ROOT / "bin" / "train.py", "dcmdp train --config=x"),
        ("dcmdp train", "dcmdp train --config=x"),
        ("/home/me/train.py", "train.py --config=x"),
    ):
        monkeypatch.setattr(sys, "argv", [str(program), "--config=x"])
        with contextlib.closing(MetricsWriter(tmp_path, devices=3)):
            pass
        line = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])
        assert (line["command"], line["machine"].partition(" x ")[0]) == (said, "3")

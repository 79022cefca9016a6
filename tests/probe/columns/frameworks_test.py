"""Recordings of other frameworks and of our own runs: found, told apart, read, and the planted
cause named.
"""

import functools
import gzip
import json
import math
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from dcmdp_jax.commands import probe, view
from dcmdp_jax.errors import UserError
from dcmdp_jax.observe.rollouts import RolloutWriter
from dcmdp_jax.probe.columns.over_training import find_files, read_run
from dcmdp_jax.probe.columns.recording_files import LeftOut
from dcmdp_jax.record import Recorder, record_skyrl, record_trl, record_verl
from tests.support.commands import run_command
from tests.support.sampled_columns import columns

FIXTURES = Path(__file__).resolve().parents[2] / "recorded" / "frameworks"
PLANTED = {
    "nemo_rl": ("nemo-rl", "support", [1, 2], (), ("code", "math")),
    "prime_rl": ("prime-rl", "raw_logprobs", [0, 1], ("rank 0", "rank 1"), ("code", "math")),
    "slime": ("slime", "temperature", [0, 1], ("rank 0", "rank 1"), ()),
    "trl": ("trl", "retokenization", [1, 2], ("rank 0", "rank 1"), ()),
    "verl": ("verl", "chat_template", [1, 2], (), ()),
    "skyrl": ("skyrl", "rounding", [1, 2], (), ()),
    "dcmdp": ("dcmdp", "stale_weights", [21, 31], (), ()),
}


_probe = functools.partial(run_command, probe.main, "probe")


def _read(*paths, **options):
    left_out = LeftOut()
    return read_run(
        find_files([str(path) for path in paths], left_out), left_out, max_tokens=10**7, **options
    )


@pytest.mark.parametrize("name", PLANTED)
def test_the_probe_names_the_planted_cause_of_a_directory(name, tmp_path, capsys):
    if name == "slime":
        pytest.importorskip("torch", reason="slime's dumps are torch files")
    framework, cause, steps, ranks, sources = PLANTED[name]
    code, said, error = _probe(capsys, FIXTURES / name, "--out", tmp_path)
    assert (code, error) == (0, "") and f"over {len(steps)} steps" in said
    [pair] = json.loads((tmp_path / "probe.json").read_text())["pairs"]
    assert pair["findings"][0]["cause"] == cause and pair["source"]["format"].startswith(framework)
    over = pair["over_training"]
    assert [step["step"] for step in over["steps"]] == steps
    assert tuple(part["name"] for part in over["ranks"]) == ranks
    assert tuple(part["name"] for part in over["sources"]) == sources
    # 40 completions of 40 tokens; a token of a prompt or of padding would make it more.
    assert (
        pair["statistics"]["tokens"]
        == sum(step["statistics"]["tokens"] for step in over["steps"])
        == 1600
    )
    page = (tmp_path / "probe.html").read_text()
    assert "Over training" in page and page.count("<figure ") == 3


@pytest.mark.parametrize("name", PLANTED)
def test_the_numbers_of_a_step_are_those_that_were_planted(name):
    if name == "slime":
        pytest.importorskip("torch", reason="slime's dumps are torch files")
    planted = {
        "nemo_rl": {"top_p": 0.9},
        "prime_rl": {"raw": True, "temperature": 0.6},
        "slime": {"temperature": 0.6},
        "trl": {"broken": 4},
        "verl": {"start": True},
        "skyrl": {"noise": 0.005},
        "dcmdp": {"lags": {0: 0.005, 4: 0.5}},
    }[name]
    pairs = columns(**planted)
    expected = pairs.discrepancy.reshape(2, -1).mean(axis=1)
    found = _read(FIXTURES / name)
    np.testing.assert_allclose(
        [step.statistics.mean for step in found.over_training.steps], expected, rtol=1e-6
    )


def _recorded(path, rank=0, steps=(1, 2, 3), framework="trl", size=0.01, rows=4):
    """p = 0.5 and q = 0.5 + size on every token, in steps of 4 completions of 3 tokens."""
    recorder = Recorder(path, framework, rank=rank)
    p = np.full((rows, 3), np.log(0.5))
    q = np.full((rows, 3), np.log(0.5 + size))
    for step in steps:
        recorder.write(step, np.arange(rows * 3).reshape(rows, 3), p, q)


def test_globs_files_and_a_rank_that_stands_out(tmp_path):
    for rank, size in enumerate((0.01, 0.01, 0.2)):
        _recorded(tmp_path, rank, size=size)
    found = _read(tmp_path / "step_*" / "rank_*.jsonl")
    assert found.rows == 36 and [part.mean for part in found.over_training.ranks] == pytest.approx(
        [0.01, 0.01, 0.2]
    )
    assert found.over_training.notes == (
        "rank 2 stands out: mean |p - q| 0.2, the others' median is 0.01.",
    )
    assert found.over_training.odd_rank == "rank 2 stands out"
    # One token in three: (0.01 + 0.01 + 0.2) / 3.
    assert found.over_training.steps[0].statistics.mean == pytest.approx(0.22 / 3)
    again = _read(
        *tmp_path.rglob("rank_0.jsonl"), tmp_path / "step_1" / "rank_*.jsonl", allow_gaps=True
    )
    assert again.rows == 12 + 8  # a file that is named twice is read once


def test_no_c_is_recommended_while_one_rank_has_other_weights(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for rank, size in enumerate((0.01, 0.5)):
        train = np.minimum(-rng.exponential(1.0, (8, 40)), 0)
        engine = np.minimum(train + size * rng.normal(0, 1, train.shape), 0)
        ids = rng.integers(1, 50_000, train.shape)
        Recorder(tmp_path / "r", "trl", rank=rank).write(1, ids, train, engine)
    code, said, _ = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")
    assert (
        code == 0
        and "No tolerance c is recommended until this is fixed: rank 1 stands out." in said
    )


def test_the_alarms_run_over_the_steps(tmp_path):
    for step in range(30):
        _recorded(tmp_path, steps=[step], size=0.01 if step < 25 else 0.2)
    over = _read(tmp_path).over_training
    # That of the first five steps: 1.25 x 0.01, rounded up. All 30 have a mean of 0.0417.
    assert "of the first 5 steps, so that a rise shows" in over.tolerance_from
    assert over.tolerance == pytest.approx(0.013) and "weight_sync" in [
        alarm.name for alarm in over.alarms
    ]
    assert _read(tmp_path, tolerance=0.3).over_training.tolerance == 0.3


def test_bounded_memory_keeps_every_step_exact(tmp_path):
    _recorded(tmp_path, steps=range(8))
    found = read_run(find_files([str(tmp_path)], LeftOut()), LeftOut(), max_tokens=30)
    assert found.stride == 4 and len(found.pairs.token_ids) == 24 and found.rows == 32
    assert [step.statistics.tokens for step in found.over_training.steps] == [12] * 8


def test_a_run_that_is_still_writing_is_read_and_what_it_lacks_is_said(tmp_path, capsys):
    for rank in range(2):
        _recorded(tmp_path / "r", rank)
    (tmp_path / "r" / "step_3" / "rank_1.jsonl").unlink()
    with (tmp_path / "r" / "step_3" / "rank_0.jsonl").open("a") as file:
        file.write('{"recorder": 1, "framework": "trl", "token_ids": [3, 4')
    code, said, error = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")
    assert (code, error) == (0, "") and "over 3 steps" in said
    line = next(line for line in said.splitlines() if line.startswith("left out: "))
    assert (
        "what is cut or incomplete" in line and "rank 1 is missing in step 3, the last one" in line
    )
    assert (
        "and 1 more" in line
        and "left out: what is cut" in (tmp_path / "out" / "probe.html").read_text()
    )
    # The viewer reads the same files.
    view.main(["view", str(tmp_path / "r"), "--out", str(tmp_path / "v")])
    assert "left out: what is cut or incomplete" in capsys.readouterr().out


def test_the_newest_file_may_be_half_written_and_an_older_one_may_not(tmp_path):
    for step in (1, 2):
        writer = RolloutWriter(tmp_path, every_steps=1, max_bytes=10**9, resume_step=step)
        writer.write(step, _completions(2, length=5))
    one, two = (tmp_path / "rollouts" / f"step_{step}.parquet" for step in (1, 2))
    whole = two.read_bytes()
    two.write_bytes(whole[:-40])
    os.utime(two, (one.stat().st_mtime + 5,) * 2)
    left_out = LeftOut()
    files = find_files([str(tmp_path / "rollouts")], left_out)
    assert [file.path for file in files] == [one] and left_out.unfinished == [str(two)]
    os.utime(one, (two.stat().st_mtime + 5,) * 2)
    with pytest.raises(UserError, match="step_2.parquet: not readable as parquet"):
        find_files([str(tmp_path / "rollouts")], LeftOut())


def test_compressed_json_lines_of_a_framework_are_the_same_recording(tmp_path):
    for path in (FIXTURES / "nemo_rl").rglob("*.jsonl"):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    packed = _read(tmp_path)
    plain = _read(FIXTURES / "nemo_rl")
    assert [step.step for step in packed.over_training.steps] == [1, 2]
    assert packed.over_training.steps == plain.over_training.steps


def _drop(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            "step_3",
            "step 3 is missing between steps 1 and 5, 1 apart elsewhere; add the files, or read "
            "on without",
        ),
        ("step_*/rank_1.jsonl", "rank 1 is missing in step 1, of 0 to 2; add the files"),
        ("step_2/rank_0.jsonl", "rank 0 is missing in step 2, of 0 to 2"),
    ],
)
def test_what_is_missing_in_the_middle_is_one_line(dropped, message, tmp_path, capsys):
    for rank in range(3):
        _recorded(tmp_path / "r", rank, steps=range(1, 6))
    for path in list((tmp_path / "r").glob(dropped)):
        _drop(path)
    code, said, error = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")
    assert (code, said) == (2, "") and message in error and error.count("\n") == 1
    code, said, error = _probe(capsys, tmp_path / "r", "--allow-gaps", "--out", tmp_path / "out")
    assert (code, error) == (0, "") and "mean |p - q|" in said


def test_steps_that_are_recorded_every_k_are_no_gap(tmp_path):
    _recorded(tmp_path, steps=(1, 11, 21))
    assert [step.step for step in _read(tmp_path).over_training.steps] == [1, 11, 21]
    _recorded(tmp_path, steps=(41,))
    with pytest.raises(
        UserError, match="step 31 is missing between steps 1 and 41, 10 apart elsewhere"
    ):
        _read(tmp_path)


def test_mixed_frameworks_and_two_runs_are_refused(tmp_path, capsys):
    _recorded(tmp_path / "a")
    _recorded(tmp_path / "b", framework="verl")
    _recorded(tmp_path / "c")
    for paths, message in (
        (("a", "b"), "recordings of several frameworks in one call: trl ("),
        (("a", "c"), "step 1, rank 0 is in "),
        ((".",), "recordings of several frameworks in one call"),
    ):
        code, said, error = _probe(
            capsys, *(tmp_path / path for path in paths), "--out", tmp_path / "out"
        )
        assert (code, said) == (2, "") and message in error and error.count("\n") == 1
    code, _, error = _probe(capsys, tmp_path / "a", "--format", "verl", "--out", tmp_path / "out")
    assert code == 2 and "--format=verl: " in error and "was recorded by trl" in error


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "x.jsonl",
            '{"logprobs": "a", "output": "b"}',
            "text without log-probs. Keys found: logprobs, output. ",
        ),
        # verl's rollout_data_dir, SkyRL's dumped evaluations, TRL's logged completions.
        (
            "x.jsonl",
            '{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}',
            "record both with dcmdp_jax.record",
        ),
        (
            "x.jsonl",
            '{"input_prompt": "a", "output_response": "b"}',
            "verl, TRL and SkyRL write none by themselves",
        ),
        (
            "x.jsonl",
            '{"step": 1, "prompt": "a", "completion": "b", "advantage": 0}',
            "record both with dcmdp_jax.record",
        ),
        ("x.jsonl", "", "no row in any file"),
        ("x.jsonl", "[1]", "must be a JSON object"),
        ("x.csv", "a", "no .jsonl, .parquet or .pt file in this directory or below"),
    ],
)
def test_a_recording_that_no_format_knows_is_one_line(name, text, message, tmp_path, capsys):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / name).write_text(text)
    code, said, error = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")
    assert (code, said) == (2, "") and message in error and error.count("\n") == 1
    assert _probe(capsys, tmp_path / "no*.jsonl")[2].count("No such file or directory") == 1


def test_a_torch_file_that_is_no_dump_is_refused_and_nothing_in_it_is_run(tmp_path):
    torch = pytest.importorskip("torch", reason="slime's dumps are torch files")
    (tmp_path / "train_0.pt").write_bytes(b"\x80\x04cos\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UserError, match="not readable by torch"):
        find_files([str(tmp_path)], LeftOut())
    torch.save({"rollout_data": {"log_probs": []}}, tmp_path / "train_0.pt")
    with pytest.raises(
        UserError, match="Keys found: rollout_data. Formats tried: .*slime .format_version"
    ):
        find_files([str(tmp_path)], LeftOut())


def test_a_wrong_value_is_named_with_file_row_and_the_frameworks_own_column(tmp_path):
    rows = [
        json.loads(line)
        for line in (FIXTURES / "prime_rl/token_exports/step_0/rank_0.jsonl").open()
    ]
    rows[3]["inference_logprobs"][9] = 0.5
    path = tmp_path / "step_0" / "rank_0.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        UserError, match="rank_0.jsonl, line 4: inference_logprobs is 0.5 at token 9"
    ):
        _read(path)


def test_the_recorder_refuses_shapes_and_writes_what_was_given(tmp_path):
    recorder = Recorder(tmp_path, "mine", rank=1)
    p = np.log(np.array([[0.5, 0.25, 0.5]], np.float32))
    for bad, message in (
        ({"mask": np.ones((1, 2))}, "mask is .1, 2., token_ids is .1, 3."),
        ({"rewards": [1.0, 2.0]}, "reward is .2., must be .1."),
    ):
        with pytest.raises(ValueError, match=message):
            recorder.write(0, [[1, 2, 3]], p, p, **bad)
    with pytest.raises(ValueError, match="rank is -1"):
        Recorder(tmp_path, "mine", rank=-1)
    options = {
        "advantages": [[1.0, 0.5, 9.0]],
        "rewards": [1],
        "groups": ["a"],
        "sources": ["s"],
        "lags": [2],
    }
    recorder.write(0, [[1, 2, 3]], p, p + np.array([0, np.nan, 0]), [[1, 1, 0]], **options)
    [row] = [json.loads(line) for line in (tmp_path / "step_0" / "rank_1.jsonl").open()]
    assert (
        row["token_ids"] == [1, 2]
        and row["rollout_logprobs"][1] is None
        and row["advantage"] == 0.75
    )
    assert np.float32(row["train_logprobs"][1]) == p[0, 1]
    assert (row["reward"], row["group"], row["source"], row["lag"]) == (1, "a", "s", 2)
    # A second process of the run begins the file anew; the first one appends.
    recorder.write(0, [[1, 2, 3]], p, p)
    assert len((tmp_path / "step_0" / "rank_1.jsonl").read_text().splitlines()) == 2
    Recorder(tmp_path, "mine", rank=1).write(0, [[1, 2, 3]], p, p)
    assert len((tmp_path / "step_0" / "rank_1.jsonl").read_text().splitlines()) == 1


def test_a_token_that_vllm_has_no_logprob_for_is_left_out_of_trls_recording(tmp_path):
    p = np.log(np.full((1, 3), 0.5))
    batch = {"completion_ids": np.array([[7, 8, 9]]), "completion_mask": np.ones((1, 3), int)}
    batch |= {"old_per_token_logps": p, "sampling_per_token_logps": p + np.array([0, np.nan, 0])}
    record_trl(Recorder(tmp_path, "trl"), 0, batch | {"advantages": np.array([1.0])})
    assert _read(tmp_path).pairs.token_ids.tolist() == [7, 9]


def test_a_run_directory_without_recordings_says_what_to_do(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    code, said, error = _probe(capsys, tmp_path, "--out", tmp_path / "out")
    assert (code, said) == (2, "") and error.count("\n") == 1
    assert "a run directory without recorded tokens" in error and "--model=" in error


def test_what_a_framework_lacks_is_said_with_the_setting_that_gives_it(tmp_path):
    recorder = Recorder(tmp_path, "trl")
    ids = np.zeros((1, 2), int)
    either = "no sampling_per_token_logps: set use_vllm=True, or return logprobs from rollout_func"
    with pytest.raises(ValueError, match=either):
        record_trl(recorder, 0, {"completion_ids": ids, "old_per_token_logps": ids})
    # TRL's default, use_vllm=False, computes neither: the other setting is True already.
    with pytest.raises(ValueError, match="no sampling_per_token_logps: set use_vllm=True"):
        record_trl(recorder, 0, {"completion_ids": ids, "completion_mask": ids})
    # With a rollout_func that setting is True already, by TRL's default.
    setting = "vllm_importance_sampling_correction=True .with use_vllm.; with rollout_func pass old"
    with pytest.raises(ValueError, match=f"no old_per_token_logps: set {setting}_logprobs, or "):
        record_trl(recorder, 0, {"completion_ids": ids, "sampling_per_token_logps": ids})
    with pytest.raises(ValueError, match="calculate_log_probs=True"):
        record_verl(recorder, 0, {"responses": ids})
    with pytest.raises(ValueError, match="no rollout_logprobs"):
        record_skyrl(recorder, 0, {"action_log_probs": ids, "rollout_logprobs": None})


def _completions(count, length=1000):
    rng = np.random.default_rng(0)
    logprobs = lambda: -rng.exponential(1, length).astype(np.float32)  # noqa: E731 - drawn twice a row
    same = dict(
        source="s",
        mask=np.ones(length, bool),
        policy_versions=np.full(length, 4),
        reward=1.0,
        advantage=0.5,
    )
    ids = lambda: rng.integers(0, 150_000, length)  # noqa: E731
    return [
        dict(
            completion=i,
            prompt_id=i // 2,
            token_ids=ids(),
            train_logprobs=logprobs(),
            rollout_logprobs=logprobs(),
        )
        | same
        for i in range(count)
    ]


def test_our_own_recording_takes_less_than_13_bytes_a_token_and_stays_within_its_bound(
    tmp_path, caplog
):
    writer = RolloutWriter(tmp_path, every_steps=5, max_bytes=600_000, resume_step=None)
    assert [step for step in range(1, 12) if writer.due(step)] == [1, 6, 11]
    for step in (1, 6, 11):
        writer.write(step, _completions(20))
    files = sorted((tmp_path / "rollouts").iterdir())
    # Random ids and log-probs, which nothing compresses: 20,000 tokens a file.
    assert [path.name for path in files] == ["step_11.parquet", "step_6.parquet"]
    assert all(9 * 20_000 < path.stat().st_size < 13 * 20_000 for path in files)
    writer.write(16, _completions(60))
    assert "more than the 0.572 MiB that rollouts/ may hold: not recorded" in caplog.text
    assert len(list((tmp_path / "rollouts").iterdir())) == 2
    RolloutWriter(tmp_path, every_steps=5, max_bytes=600_000, resume_step=6)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_6.parquet"]
    RolloutWriter(tmp_path, every_steps=5, max_bytes=600_000, resume_step=None)
    assert (
        not (tmp_path / "rollouts").exists()
        and (tmp_path / "rollouts.previous" / "step_6.parquet").is_file()
    )


def _steps(directory, behind, steps=12):
    """A policy that learns: its logits move a step at a time, and the engine's with them or,
    `behind`, not at all.
    """
    rng = np.random.default_rng(0)
    start = rng.normal(0, 2, (40, 30))
    change = rng.normal(0, 0.3, (40, 30))
    for step in range(steps):
        logits = start + step * change
        p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        q = start - np.log(np.exp(start).sum(axis=1, keepdims=True)) if behind else p
        q = q + 0.01 * rng.normal(0, 1, q.shape)
        q -= np.log(np.exp(q).sum(axis=1, keepdims=True))
        ids = (q + rng.gumbel(size=(16, *q.shape))).argmax(axis=2)
        of = lambda x: np.take_along_axis(x[None], ids[..., None], 2)[..., 0]  # noqa: B023, E731 - used at once
        Recorder(directory, "verl").write(step, ids, of(p), of(q))


def test_an_engine_that_the_updates_do_not_reach_is_named_from_the_course_over_the_steps(
    tmp_path, capsys
):
    for behind in (True, False):
        directory = tmp_path / str(behind)
        _steps(directory, behind)
        _, said, _ = _probe(capsys, directory, "--out", tmp_path / "out")
        [pair] = json.loads((tmp_path / "out" / "probe.json").read_text())["pairs"]
        alarms = [alarm["name"] for alarm in pair["over_training"]["alarms"]]
        if behind:
            assert (pair["findings"][0]["cause"], alarms) == ("unseen_updates", ["unseen_updates"])
            # One screen does not both refuse and recommend a c.
            assert (
                pair["recommendation"]["tolerance"] is None
                and pair["over_training"]["tolerance"] is None
            )
            assert "(no c)" in said and "raise c" not in said and "noise floor of 0" not in said
        else:
            assert (pair["findings"][0]["cause"], alarms) == ("rounding", [])
            assert pair["findings"][0]["title"].endswith("; sampling not checked")


def test_identical_completions_are_named_unless_chance_makes_them(tmp_path, capsys):
    for name, sharpness in (("seeded", 1.0), ("sure", 8.0)):
        rng = np.random.default_rng(0)
        logits = sharpness * rng.normal(0, 1, (4, 40, 30))
        q = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
        # Four prompts, eight completions each; those of "seeded" share their random numbers.
        noise = (
            rng.gumbel(size=(1, *q.shape)).repeat(8, 0)
            if name == "seeded"
            else rng.gumbel(size=(8, *q.shape))
        )
        ids = (q + noise).argmax(axis=3).reshape(32, 40)
        of = np.take_along_axis(np.tile(q, (8, 1, 1)), ids[..., None], 2)[..., 0]
        Recorder(tmp_path / name, "mine").write(0, ids, of, of)
        _, said, _ = _probe(capsys, tmp_path / name, "--out", tmp_path / "out")
        assert ("identical completions" in said) == (name == "seeded")
        assert name != "seeded" or "32 of 32 completions equal another one token by token" in said


def test_columns_of_other_names_are_found_by_their_cells(tmp_path, capsys):
    row = {"ids": [7, 8], "lp_train": [-0.5, -0.25], "lp_vllm": [-0.5, None], "dialog": "a"}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    code, _, error = _probe(capsys, tmp_path / "r.jsonl", "--out", tmp_path / "out")
    wanted = (
        "lp_train, lp_vllm hold log-probs: name the training stack's by --train-column, the "
        "engine's by"
    )
    assert code == 2 and wanted in error and "--token-column=ids" in error
    (tmp_path / "r.jsonl").write_text(json.dumps({"dialog": "a", "token_count": 3}) + "\n")
    assert (
        "text without log-probs"
        in _probe(capsys, tmp_path / "r.jsonl", "--out", tmp_path / "out")[2]
    )


@pytest.mark.parametrize(
    ("recording", "format_name", "column"),
    [
        ("prime_rl/token_exports/step_0/rank_0.jsonl", "prime-rl", "trainer_logprobs"),
        ("nemo_rl/train_data_step1.jsonl", "nemo-rl", "prev_logprobs"),
        ("trl/step_1/rank_0.jsonl", "recorder", "rollout_logprobs"),
    ],
)
def test_the_column_that_the_nearest_format_lacks_is_named(
    recording, format_name, column, tmp_path
):
    row = json.loads((FIXTURES / recording).open().readline())
    del row[column]
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    missing = f"r.jsonl: looks like {format_name}, column {column} is missing; "
    with pytest.raises(UserError, match=missing):
        find_files([str(tmp_path / "r.jsonl")], LeftOut())


def test_columns_of_the_recorders_names_are_read_without_flags(tmp_path, capsys):
    row = {"token_ids": [7, 8], "train_logprobs": [-0.5, -0.25], "rollout_logprobs": [-0.75, -0.25]}
    (tmp_path / "r.jsonl").write_text(json.dumps(row) + "\n")
    assert _read(tmp_path / "r.jsonl").pairs.token_ids.tolist() == [7, 8]
    # |e^-0.5 - e^-0.75| / 2 = 0.0671.
    arguments = tmp_path / "r.jsonl", "--out", tmp_path / "out"
    assert _probe(capsys, *arguments, "--fail-above=0.068")[0] == 0
    code, said, error = _probe(capsys, *arguments, "--fail-above=0.067")
    assert (code, error) == (
        1,
        "mean |p - q| above --fail-above=0.067: columns r 0.0671\n",
    ) and "wrote" in said


def test_the_remedy_names_the_frameworks_own_setting(tmp_path, capsys):
    settings = {
        "verl": "actor_rollout_ref.rollout.temperature",
        "skyrl": "generator.sampling_params.temperature",
    }
    for framework, setting in settings.items():
        pairs = columns(temperature=0.7)
        cells = [
            x.reshape(40, 40)
            for x in (pairs.token_ids, pairs.train_logprobs, pairs.rollout_logprobs)
        ]
        Recorder(tmp_path / framework, framework).write(0, *cells)
        assert (
            f"Here: {setting}."
            in _probe(capsys, tmp_path / framework, "--out", tmp_path / "out")[1]
        )


def test_entropies_reach_the_recording_of_each_framework(tmp_path):
    p = np.log(np.full((1, 2), 0.5))
    ones = np.ones((1, 2), int)
    trl = {
        "completion_ids": ones,
        "completion_mask": ones,
        "old_per_token_logps": p,
        "sampling_per_token_logps": p,
    }
    verl = {"responses": ones, "old_log_probs": p, "rollout_log_probs": p, "response_mask": ones}
    skyrl = {"sequences": ones, "loss_mask": ones, "action_log_probs": p, "rollout_logprobs": p}
    batches = (record_trl, trl), (record_verl, verl), (record_skyrl, skyrl)
    for record, batch in batches:
        directory = tmp_path / record.__name__
        record(
            Recorder(directory, "x"),
            0,
            batch | {"advantages": np.ones(1)},
            entropies=np.array([[0.5, 0.25]]),
        )
        assert _read(directory).pairs.entropies.tolist() == [0.5, 0.25]


def test_each_framework_that_records_a_reward_is_judged_by_it_and_the_others_say_so(
    tmp_path, capsys
):
    """A reward of a completion is 0 or 1 in turns; what NeMo-RL writes is a batch of one."""
    for name in ("nemo_rl", "verl", "dcmdp"):
        assert [step.reward for step in _read(FIXTURES / name).over_training.steps] == [0.5, 0.5]
    code, said, _ = _probe(capsys, FIXTURES / "prime_rl", "--out", tmp_path)
    line = "no reward in this recording: whether it collapsed is not judged"
    assert code == 0 and said.splitlines()[-2].startswith(line)
    assert line in (tmp_path / "probe.html").read_text()
    # Two steps are too few, and are said to be.
    _, said, _ = _probe(capsys, FIXTURES / "verl", "--out", tmp_path)
    assert "fewer than 10 steps: whether the reward collapsed is not judged" in said.splitlines()


def test_verls_bypass_mode_is_named_by_the_recorder_and_by_the_verdict(tmp_path, capsys):
    p = np.log(np.full((8, 32), 0.5, np.float32))
    ones = np.ones((8, 32), int)
    batch = {"responses": ones, "old_log_probs": p, "response_mask": ones}
    with pytest.warns(UserWarning, match="bit for bit.*rollout_correction.bypass_mode=False"):
        record_verl(Recorder(tmp_path / "r", "verl"), 1, batch | {"rollout_log_probs": p.copy()})
    said = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")[1]
    assert "one column recorded twice? verl: bypass_mode" in said
    # One step is said once.
    assert "\nmean |p - q| 0 in step 1\n" in said and "over 1 steps" not in said
    # One value of 256 differs in its last bit: no bypass.
    other = p.copy()
    other[0, 0] = np.nextafter(other[0, 0], 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record_verl(Recorder(tmp_path / "s", "verl"), 1, batch | {"rollout_log_probs": other})


def test_slimes_rewards_are_those_of_the_rollout_before_normalization(tmp_path):
    torch = pytest.importorskip("torch", reason="slime's dumps are torch files")
    payload = torch.load(FIXTURES / "slime" / "train_0.pt", weights_only=True)
    # Two samples of the rollout were filtered out: their reward counts for nothing.
    payload["raw_reward"] = [0.25] * len(payload["samples"])
    payload["raw_reward"][:2] = [9.0, 9.0]
    del payload["samples"][:2]
    torch.save(payload, tmp_path / "train_0.pt")
    [step] = _read(tmp_path).over_training.steps
    assert step.reward == 0.25


def test_skyrls_reward_is_the_sum_over_a_completions_tokens(tmp_path):
    p = np.log(np.full((1, 3), 0.5))
    batch = {"sequences": np.ones((1, 3), int), "loss_mask": np.ones((1, 3))}
    batch |= {"action_log_probs": p, "rollout_logprobs": p, "advantages": np.ones(1)}
    rewards = np.array([[0.25, 0.0, 0.5]])
    record_skyrl(Recorder(tmp_path, "skyrl"), 1, batch | {"rewards": rewards})
    assert _read(tmp_path).over_training.steps[0].reward == 0.75


def test_the_reward_of_a_recording_is_shown_over_its_mismatch_with_the_signs(tmp_path, capsys):
    """Two completions a step: rewards of mean 0.75, then of 0.25 from step 9 on."""
    recorder = Recorder(tmp_path / "r", "trl")
    p = np.full((2, 3), np.log(0.5))
    for step in range(1, 13):
        rewards = [0.5, 1.0] if step < 9 else [0.0, 0.5]
        q = np.full((2, 3), np.log(0.51 if step < 7 else 0.55))
        recorder.write(step, np.arange(6).reshape(2, 3), p, q, rewards=rewards)
    over = _read(tmp_path / "r").over_training
    assert [step.reward for step in over.steps] == [0.75] * 8 + [0.25] * 4
    assert over.collapse.step == 8
    assert over.collapse.supporting[0].startswith("The discrepancy had doubled before")
    code, said, _ = _probe(capsys, tmp_path / "r", "--out", tmp_path / "out")
    assert code == 0 and "no reward in this recording" not in said
    alerts, signs = said.split("After step 8 the reward fell by more than half")
    assert "alerts over the steps" in alerts
    assert "  a sign that it is: The discrepancy had doubled" in signs
    assert "  A control decides: " in signs
    page = (tmp_path / "out" / "probe.html").read_text()
    assert "After step 8 the reward fell by more than half: is the mismatch why?" in page
    assert "mean reward" in page and "The discrepancy had doubled before" in page


def test_a_recorder_warns_of_later_steps_that_may_be_of_another_run(tmp_path):
    """Three steps, then a run of two in the same directory: step 2 is the earlier run's still."""

    def write(first, last):
        recorder = Recorder(tmp_path / "r", "mine")
        for step in range(first, last):
            recorder.write(step, [[1, 2]], [[-0.5, -1.0]], [[-0.5, -1.1]])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(0, 3)
        write(2, 5)  # resumed after step 1: none is left behind
    with pytest.warns(UserWarning, match=r"/r has steps up to 4, this recording begins at 0: if"):
        write(0, 2)


_GENERIC = {
    "token_ids": [7, 8],
    "train_logprobs": [-0.5, -0.25],
    "rollout_logprobs": [-0.75, -0.25],
}


def _generic(path, rows):
    """A file of rows of the recorder's names: `_GENERIC` and the given cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(_GENERIC | row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "cell"), [("mask", [0, 1]), ("entropies", [1.0, 1.0]), ("lag", 2), ("step", 1)]
)
def test_a_column_that_some_rows_lack_is_refused(name, cell, tmp_path):
    row = {name: cell}
    for absent in ({}, {name: None}):
        path = _generic(tmp_path / "r.jsonl", [row, row, absent, row])
        lacks = f"r.jsonl, line 3: {name} is null or missing, the rows before have it; give it"
        with pytest.raises(UserError, match=lacks):
            _read(path)
        with pytest.raises(UserError, match=f"line 2: {name} is given, the rows before have none"):
            _read(_generic(path, [absent, row]))
    # So are the files of one recording among each other.
    first = _generic(tmp_path / "a.jsonl", [row])
    second = _generic(tmp_path / "b.jsonl", [{}])
    with pytest.raises(UserError, match=f"jsonl, line 1: {name} is "):
        _read(first, second)
    assert _read(_generic(path, [row, row])).rows == 2


def test_the_viewer_takes_no_prompt_for_a_completion(tmp_path):
    path = _generic(tmp_path / "r.jsonl", [{"mask": [0, 1]}, {}])
    with pytest.raises(UserError, match="line 2: mask is null or missing"):
        view.main(["view", str(path), "--out", str(tmp_path / "v")])


def test_a_whole_step_of_pandas_is_read_and_other_steps_are_refused(tmp_path):
    rows = [{"step": 1.0, "rank": 0.0}, {"step": 2.0, "rank": 0.0}]
    steps = _read(_generic(tmp_path / "r.jsonl", rows)).over_training.steps
    assert [step.step for step in steps] == [1, 2]
    for value, text in (
        ("1", "'1'"),
        (1.5, "1.5"),
        (True, "True"),
        (10**30, "10+"),
        ([1], r"\[1\]"),
    ):
        path = _generic(tmp_path / "r.jsonl", [{"step": value}])
        with pytest.raises(UserError, match=f"r.jsonl, line 1: step is {text}, must be a whole"):
            _read(path)
    # The first row tells the framework; later ones are checked alike.
    path = _generic(tmp_path / "r.jsonl", [{"step": 1}, {"step": "1"}])
    with pytest.raises(UserError, match="r.jsonl, line 2: step is '1', must be a whole number"):
        _read(path)


def test_a_file_whose_name_and_rows_say_different_steps_or_ranks_is_refused(tmp_path):
    path = _generic(tmp_path / "step_3" / "rank_0.jsonl", [{"step": 5, "rank": 0}])
    with pytest.raises(UserError, match="line 1: step is 5, the file's name says 3; leave out a"):
        _read(path)
    path = _generic(tmp_path / "step_3" / "rank_1.jsonl", [{"step": 3, "rank": 0}])
    with pytest.raises(UserError, match="line 1: rank is 0, the file's name says 1; leave out a"):
        _read(path)
    own = tmp_path / "rollouts" / "step_41.parquet"
    own.parent.mkdir()
    shutil.copy(FIXTURES / "dcmdp" / "rollouts" / "step_31.parquet", own)
    with pytest.raises(UserError, match="parquet, row 1: step is 31, the file's name says 41"):
        _read(own)


_OWN = {
    "step without one": ({"step": None}, "step is null or missing; each row of a run has"),
    "step as text": ({"step": "5"}, "step is '5', must be a whole number"),
    "versions null": ({"policy_versions": None}, "policy_versions is None, must be a list of"),
    "a version null": (
        {"policy_versions": [-1, 4, None]},
        "policy_versions is NaN or null at token 2; must be below the row's step, 5",
    ),
    "a version of the future": (
        {"policy_versions": [-1, 5, 4]},
        "policy_versions is 5 at token 1; must be below the row's step, 5",
    ),
    "versions short": (
        {"policy_versions": [-1, 4]},
        "policy_versions has 2 entries, token_ids has 3",
    ),
    "mask short": ({"mask": [False, True]}, "mask has 2 entries, token_ids has 3"),
    "mask null": ({"mask": None}, "mask is None, must be a list of numbers"),
}


@pytest.mark.parametrize(("cells", "message"), _OWN.values(), ids=_OWN)
def test_a_wrong_row_of_a_run_is_one_line(cells, message, tmp_path):
    row = {
        "prompt_id": 0,
        "step": 5,
        "token_ids": [7, 8, 9],
        "train_logprobs": [0.0, -0.5, -0.25],
        "rollout_logprobs": [0.0, -0.75, -0.25],
        "mask": [False, True, True],
        "policy_versions": [-1, 4, 2],
    }
    path = tmp_path / "rollouts" / "step_5.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row]), path)
    # Weights of version 4 are those of step 5; version 2 is two steps older.
    assert _read(path).pairs.lags.tolist() == [0, 2, 0, 2]
    if cells == {"step": "5"}:
        row = row | cells
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row | cells]), path)
    with pytest.raises(UserError, match=f"step_5.parquet, row [12]: {message}") as raised:
        _read(path)
    assert "\n" not in str(raised.value)
    if cells == {"step": None}:
        del row["step"]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        with pytest.raises(UserError, match="row 1: step is null or missing"):
            _read(path)


def test_a_missing_reward_is_left_out_of_its_steps_mean_and_said(tmp_path, capsys):
    rows = [{"step": step, "reward": reward} for step in (1, 2) for reward in (1.0, 0.5, 0.0)]
    for missing in (None, math.nan, math.inf):
        rows[1]["reward"] = missing
        path = _generic(tmp_path / "r.jsonl", rows)
        over = _read(path).over_training
        # Two of three completions: (1 + 0) / 2.
        assert [step.reward for step in over.steps] == [0.5, 0.5]
        assert over.without_collapse.startswith("fewer than 10 steps")
        _, said, _ = _probe(capsys, path, "--out", tmp_path / "out")
        line = "left out: 1 rewards that are null, NaN or infinite, of their step's mean, the first"
        assert line in said and f"{path}, line 2" in said
    # A step without any reward has no mean; the others have.
    for row in rows[3:]:
        row["reward"] = None
    over = _read(_generic(tmp_path / "r.jsonl", rows)).over_training
    assert over.without_collapse.startswith("no reward in 1 of 2 steps, the first is step 2: ")
    # A recording without rewards lacks none.
    _, said, _ = _probe(capsys, _generic(tmp_path / "s.jsonl", [{}]), "--out", tmp_path / "out")
    assert "left out" not in said


@pytest.mark.parametrize("reward", ["0.5", [1.0], {}, 10**400])
def test_a_reward_that_is_no_number_is_refused(reward, tmp_path):
    path = _generic(tmp_path / "r.jsonl", [{"step": 1, "reward": 0.5}, {"step": 1}])
    assert _read(path).rows == 2
    _generic(path, [{"step": 1, "reward": 0.5}, {"step": 1, "reward": reward}])
    with pytest.raises(UserError, match="r.jsonl, line 2: reward is .*, must be one number") as bad:
        _read(path)
    assert "\n" not in str(bad.value)


def _slime_dump(path, change=lambda payload: None):
    """Two samples of slime with a prompt of one token, changed and saved."""
    torch = pytest.importorskip("torch", reason="slime's dumps are torch files")
    samples = []
    for position in range(2):
        samples.append(
            {
                "tokens": torch.tensor([9, 7, 8]),
                "log_probs": torch.tensor([-0.5, -0.25]),
                "rollout_log_probs": torch.tensor([-0.75, -0.25]),
                "loss_masks": torch.ones(2, dtype=torch.int32),
                "rollout_position": position,
            }
        )
    payload = {
        "format_version": 2,
        "rollout_id": 3,
        "raw_reward": [1.0, 0.5],
        "samples": samples,
    }
    change(payload)
    torch.save(payload, path)
    return path


def test_slimes_numbers_are_read_as_tensors_too(tmp_path):
    torch = pytest.importorskip("torch", reason="slime's dumps are torch files")

    def to_tensors(payload):
        for name in ("format_version", "rollout_id", "raw_reward"):
            payload[name] = torch.tensor(payload[name])
        for sample in payload["samples"]:
            sample["rollout_position"] = torch.tensor(sample["rollout_position"])

    def to_list_of_tensors(payload):
        payload["raw_reward"] = list(torch.tensor([1.0, 0.5]))

    # A file each: the last one that was read is cached by its path.
    changes = {"plain": lambda payload: None, "all": to_tensors, "rewards": to_list_of_tensors}
    for name, change in changes.items():
        recording = _read(_slime_dump(tmp_path / f"{name}.pt", change))
        [step] = recording.over_training.steps
        assert (step.step, step.reward) == (3, 0.75)
        assert recording.pairs.token_ids.tolist() == [7, 8, 7, 8]


_SLIME = {
    "rewards as a number": (
        lambda payload: payload.update(raw_reward=1.0),
        "train_3.pt: raw_reward is 1.0, must be a list with one reward a sample",
    ),
    "a sample that is no dict": (
        lambda payload: payload["samples"].append(3),
        "train_3.pt, row 3: the sample is 3, must be a dict",
    ),
    "an older version": (
        lambda payload: payload.update(format_version=1),
        "train_3.pt: format_version is 1, must be 2",
    ),
    "a later version": (
        lambda payload: payload.update(format_version=3),
        "train_3.pt: format_version is 3, must be 2",
    ),
    "a sample without a column": (
        lambda payload: payload["samples"][1].pop("rollout_log_probs"),
        "train_3.pt, row 2: no column 'rollout_log_probs'",
    ),
    "a column that is None": (
        lambda payload: payload["samples"][1].update(rollout_log_probs=None),
        "train_3.pt, row 2: no column 'rollout_log_probs'",
    ),
    "a column of another length": (
        lambda payload: payload["samples"][1].update(rollout_log_probs=[-0.75]),
        "train_3.pt, row 2: rollout_log_probs has 1 entries, tokens has 2",
    ),
    "half a rollout": (
        lambda payload: payload.update(rollout_id=3.5),
        "train_3.pt, row 1: rollout_id is 3.5, must be a whole number",
    ),
}


@pytest.mark.parametrize(("change", "message"), _SLIME.values(), ids=_SLIME)
def test_a_wrong_dump_of_slime_is_one_line(change, message, tmp_path):
    path = _slime_dump(tmp_path / "train_3.pt", change)
    with pytest.raises(UserError, match=message) as raised:
        _read(path)
    assert "\n" not in str(raised.value)


class _Unknown:
    """A class that a torch file of plain values may not hold."""


def test_a_torch_file_that_is_not_readable_is_said_in_plain_words(tmp_path):
    torch = pytest.importorskip("torch", reason="slime's dumps are torch files")
    path = tmp_path / "train_3.pt"
    # A cut file of many tensors is an invalid argument for the system; others torch names.
    many = [torch.zeros(9) for _ in range(200)]
    _slime_dump(path, lambda payload: payload.update(other=many))
    whole = path.read_bytes()
    ours = r"train_3.pt: not readable by torch \(it is empty, cut or no torch file\); dump it again"
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=ours):
            _read(path)
    _slime_dump(path, lambda payload: payload.update(other=_Unknown()))
    with pytest.raises(
        UserError, match=r"by torch \(Weights only load failed\); dump it"
    ) as raised:
        _read(path)
    assert "\x1b" not in str(raised.value)

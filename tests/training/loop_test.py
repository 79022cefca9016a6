"""Whole runs in processes of their own: killed, resumed, exact.

One is on real data with a real checkpoint.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.run_invariants import contradictions
from tests.support.runs import ROOT, finish, read_digests, read_metadata, read_records, start
from tests.support.waiting import HANGS_S, wait_until

SHARED = ROOT.parent / "shared"


# bin.train; prints each weight sync and its version, and, where the first argument says so, gets
# SIGTERM in the middle of
# sampling: "step 2" of training, or the third "evaluation".
_PROGRAM = """
import os, signal, sys
from dcmdp_jax.commands import failures, train
from dcmdp_jax.engines.local.engine import LocalEngine
from dcmdp_jax.rewards.scoring import BatchScoring

*where, number = sys.argv.pop(1).split()
calls = []
push, generate, begin = LocalEngine.sync_weights, LocalEngine.generate, BatchScoring.begin

def noted_push(self, params, policy_version):
    print("synced", policy_version, "beside old weights" if self.weights else "", flush=True)
    return push(self, params, policy_version)

def noted_generate(self, *arguments, seed, step, **options):
    calls.append(["evaluation"] if seed else ["step", step])
    return generate(self, *arguments, seed=seed, step=step, **options)

def interrupted_begin(self, rows, completion_ids):
    now = ["step", int(number)] if where == ["step"] else ["evaluation"]
    if where and calls[-1] == now and (where == ["step"] or calls.count(now) == int(number)):
        os.kill(os.getpid(), signal.SIGTERM)
    begin(self, rows, completion_ids)

LocalEngine.sync_weights, LocalEngine.generate, BatchScoring.begin = noted_push, noted_generate, interrupted_begin
failures.run_main(train.main)
"""


def _wait_for_checkpoint(run_dir, step, process):
    checkpoint = Path(run_dir) / "checkpoints" / str(step)
    wait_until(lambda: checkpoint.is_dir() or process.poll() is not None, f"checkpoint {step}")
    assert checkpoint.is_dir(), process.communicate()[0]


def _prompts_taken(run_dir, step):
    return read_metadata(run_dir, step)["prompts_taken"]


def _scores(run_dir):
    """Steps of the checkpoints, each with its score or None."""
    found = {}
    for path in (Path(run_dir) / "checkpoints").iterdir():
        if path.name.isdigit():
            score = path / "metrics" / "metrics"
            found[int(path.name)] = (
                json.loads(score.read_text())["score"] if score.exists() else None
            )
    return found


# Evaluations are due at every step, so wherever a signal comes the resumed run has one to make up
# for.
_EVALUATED = (
    "--config.training.steps=6",
    "--config.checkpoint.every_steps=2",
    "--config.evaluation.every_steps=1",
    "--config.checkpoint.keep_last=9",
)


@pytest.fixture(scope="module")
def whole(run_environment, tmp_path_factory):
    """An undisturbed run and what its engine got.

    The versions, and the weight syncs to an engine that still had weights.
    """
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    output = finish(start(run_environment, run_dir, _EVALUATED, program=("-c", _PROGRAM, "0")))
    syncs = [line for line in output.splitlines() if line.startswith("synced ")]
    return (
        run_dir,
        [int(line.split()[1]) for line in syncs],
        sum("beside" in line for line in syncs),
    )


def test_weights_are_synced_once_a_step(whole):
    """Evaluated or not: the policy of step k is judged and sampled from with the same weight sync."""
    assert whole[1] == list(range(7))


def test_the_engine_has_no_weights_in_a_step(whole):
    """Each weight sync but the first comes after a step, and finds them freed."""
    assert whole[2] == 0


def test_a_whole_run_records_nothing_that_contradicts_itself(whole):
    assert contradictions(whole[0]) == []
    assert _prompts_taken(whole[0], 6) == 6 * 4


def test_every_evaluated_policy_has_its_score_beside_it(whole):
    records = read_records(whole[0])
    assert _scores(whole[0]) == {step: records[step]["eval/arithmetic/avg@2"] for step in range(7)}


@pytest.mark.long
def test_a_signal_while_sampling_saves_and_leaves_at_once(run_environment, tmp_path, whole):
    """The state is final after the last update: nothing of what is sampled is waited for."""
    run_dir = tmp_path / "run"
    # In training; then in the resumed run's first evaluation, which comes after step 3.
    for where, step in (("step 2", 2), ("evaluation 1", 3)):
        output = finish(
            start(run_environment, run_dir, _EVALUATED, program=("-c", _PROGRAM, where)), code=143
        )
        assert f"stopped by SIGTERM after step {step}, saved; the same command resumes" in output
        records = read_records(run_dir)
        assert sorted(records) == list(range(step + 1))
        assert ("eval/arithmetic/avg@2" in records[step]) == where.startswith("step")
        assert (_scores(run_dir)[step] is not None) == where.startswith("step")
    finish(start(run_environment, run_dir, _EVALUATED))
    assert read_records(run_dir) == read_records(whole[0])
    assert read_digests(run_dir, 6) == read_digests(whole[0], 6)
    assert _scores(run_dir) == _scores(whole[0])


# Two problems learned by heart before training; a step so large that the policy knows nothing
# afterwards.
_SPOILT = """
    --config.warmup.task=arithmetic:difficulty=1,count=2 --config.warmup.steps=300
    --config.evaluation.task=arithmetic:difficulty=1,count=2 --config.evaluation.every_steps=1
    --config.training.prompts_per_mini_batch=4 --config.optimizer.learning_rate=1
    --config.optimizer.weight_decay=1 --config.rollout.precision=float32 --config.training.steps=3
    --config.checkpoint.keep_last=1 --config.checkpoint.keep_best=1 --config.rollout.max_completion_tokens=32
    --config.training.row_lengths=(96,)
""".split()


@pytest.mark.long
def test_the_initial_policy_can_be_the_best(run_environment, tmp_path):
    finish(start(run_environment, tmp_path / "run", _SPOILT))
    scores = [
        record["eval/arithmetic/avg@2"]
        for _, record in sorted(read_records(tmp_path / "run").items())
    ]
    assert scores[0] > 0.5 > max(scores[1:])
    assert _scores(tmp_path / "run") == {0: scores[0], 3: scores[3]}


@pytest.mark.long
def test_a_policy_whose_evaluation_a_signal_put_off_can_be_the_best(run_environment, tmp_path):
    program = ("-c", _PROGRAM, "evaluation 1")
    finish(start(run_environment, tmp_path / "run", _SPOILT, program=program), code=143)
    assert _scores(tmp_path / "run") == {0: None}
    finish(start(run_environment, tmp_path / "run", _SPOILT))
    scores = [
        record["eval/arithmetic/avg@2"]
        for _, record in sorted(read_records(tmp_path / "run").items())
    ]
    assert scores[0] > 0.5 > max(scores[1:])
    assert _scores(tmp_path / "run") == {0: scores[0], 3: scores[3]}


def test_killed_and_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    run_environment, tmp_path, whole
):
    broken = tmp_path / "broken"
    process = start(run_environment, broken, _EVALUATED)
    _wait_for_checkpoint(broken, 2, process)
    process.kill()
    process.communicate()
    # Then a polite stop, which saves whatever step it is at.
    process = start(run_environment, broken, _EVALUATED)
    _wait_for_checkpoint(broken, 4, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANGS_S)
    assert process.returncode in (0, 143), output  # 0: the last step was quicker than the signal
    assert "resuming" in output
    finish(start(run_environment, broken, _EVALUATED))

    assert read_digests(broken, 6) == read_digests(whole[0], 6)
    undisturbed = read_records(whole[0])
    resumed = read_records(broken)
    assert sorted(undisturbed) == list(range(7))
    assert all("eval/arithmetic/avg@2" in record for record in undisturbed.values())
    # Every evaluated policy is kept until the newer ones push it out, whatever
    # checkpoint.every_steps is.
    assert _scores(broken) == _scores(whole[0]) and sorted(_scores(broken)) == list(range(7))
    assert resumed == undisturbed and contradictions(broken) == []
    assert (broken / "report.html").is_file()


@pytest.mark.long
def test_sigterm_saves_and_says_so(run_environment, tmp_path):
    # At another temperature than the run below, which keeps its step 0 as well.
    process = start(
        run_environment,
        tmp_path / "run",
        [
            "--config.training.steps=500",
            "--config.evaluation.every_steps=0",
            "--config.rollout.temperature=0.5",
            "--config.checkpoint.keep_last=9",
        ],
    )
    wait_until(
        lambda: len(read_records(tmp_path / "run")) >= 2 or process.poll() is not None, "two steps"
    )
    assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGTERM)
    output = finish(process, code=143)
    assert "stopped by SIGTERM" in output and "Traceback" not in output
    last = max(read_records(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()

    finish(
        start(
            run_environment,
            tmp_path / "other",
            ["--config.training.steps=1", "--config.evaluation.every_steps=0"],
        )
    )
    # The warm-up knows nothing of the sampling temperature.
    assert (
        read_digests(tmp_path / "run", 0)["params"] == read_digests(tmp_path / "other", 0)["params"]
    )


@pytest.mark.long
def test_exact_engine_has_no_discrepancy_in_a_whole_run(run_environment, tmp_path):
    # XLA's newer code generator of fusions, as in all runs but the tests: the older one's last bits
    # differ here.
    environment = run_environment | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    finish(
        start(
            environment,
            tmp_path / "run",
            ["--config.rollout.precision=exact", "--config.training.steps=3"],
        )
    )
    records = read_records(tmp_path / "run")
    for step in (1, 2, 3):
        assert records[step]["discrepancy/max"] == 0.0
        assert records[step]["discrepancy/mean"] == 0.0
        # The sampler's own numbers are another program's: near, but not the same.
        assert 0 < records[step]["mismatch/sampler"] < 1e-5
    # Measured once, on the first step: a float32 engine against itself differs by rounding only.
    assert (
        0 < records[1]["mismatch/noise_floor"] < 1e-5 and "mismatch/noise_floor" not in records[2]
    )


@pytest.mark.long
def test_a_defect_in_a_run_keeps_its_traceback_beside_the_run(run_environment, tmp_path):
    broken = (
        "import jax\nfrom dcmdp_jax.training import batches\nbatches.pack = lambda *a, **k: "
        "jax.vmap(max)(a, 1)\n"
    )
    program = (
        "-c",
        f"{broken}from dcmdp_jax.commands import failures, train\nfailures.run_main(train.main)",
    )
    output = finish(start(run_environment, tmp_path / "run", program=program), code=1)
    log = tmp_path / "run" / "error.log"
    assert (
        output.splitlines()[-1].endswith(f"(unexpected; traceback: {log})")
        and "Traceback" not in output
    )
    assert (
        log.read_text().count("Traceback (most recent call last)") == 1
        and "in _pack" in log.read_text()
    )


@pytest.mark.long
def test_dynamic_sampling_fills_the_batch_and_resumes_exactly(run_environment, tmp_path):
    """Later prompts replace equal groups; a killed run goes on from the prompt that it had come to."""
    settings = [
        "--config.training.steps=4",
        "--config.checkpoint.every_steps=1",
        "--config.evaluation.every_steps=0",
        "--config.checkpoint.keep_last=9",
        "--config.algorithm.drop_equal_groups=true",
        "--config.algorithm.refill_rounds=2",
        # A policy that knows little gets it right now and then: some groups of four differ, others
        # do not.
        f"--config.rewards.functions={ROOT}/tests/rewards/planted_rewards.py:begins_with_a_multiple_of_eight",
    ]
    finish(start(run_environment, tmp_path / "run", settings))
    records = read_records(tmp_path / "run")
    assert contradictions(tmp_path / "run") == []
    assert max(record["rollout/refill_rounds"] for record in records.values()) in (1, 2)
    # The batch has groups that differ, and some of them are from a later round.
    assert all(record["rollout/unfilled_groups"] < 4 for record in records.values())
    assert any(record["optimizer/grad_norm"] > 0 for record in records.values())
    taken = np.cumsum([record["rollout/sampled_prompts"] for _, record in sorted(records.items())])
    assert _prompts_taken(tmp_path / "run", 4) == taken[-1] > 4 * 4

    broken = tmp_path / "broken"
    process = start(run_environment, broken, settings)
    _wait_for_checkpoint(broken, 2, process)
    process.kill()
    process.communicate()
    finish(start(run_environment, broken, settings))
    assert read_records(broken) == records
    assert read_digests(broken, 4) == read_digests(tmp_path / "run", 4)


@pytest.mark.long
@pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs DAPO-Math-17K, which lies beside the development checkout"
)
def test_dapo_with_a_transformers_checkpoint(run_environment, tmp_path):
    """Ten steps on real data, kill -9, resume, export.

    transformers gives the export the trained model's logits.
    """
    torch = pytest.importorskip(
        "torch", reason="torch (extra 'dev') makes and loads the checkpoint"
    )
    import jax
    import jax.numpy as jnp
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from dcmdp_jax.data.arithmetic import build_tokenizer
    from dcmdp_jax.models import decoder
    from dcmdp_jax.models.decoder import Compute
    from dcmdp_jax.run.weights import find_params

    torch.manual_seed(0)
    source = tmp_path / "source"
    hf_config = Qwen3Config(
        vocab_size=104,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    hf = Qwen3ForCausalLM(hf_config)
    hf.save_pretrained(source)
    build_tokenizer().save_pretrained(source)
    run_dir = tmp_path / "run"
    settings = [
        f"--config.model.path={source}",
        f"--config.task.train={SHARED / 'data/train/dapo_math_17k.parquet'}",
        "--config.task.max_prompt_tokens=200",
        "--config.rollout.group_size=2",
        "--config.rollout.max_completion_tokens=8",
        "--config.rollout.compute_dtype=float32",
        "--config.model.compute_dtype=float32",
        "--config.training.prompts_per_step=4",
        "--config.training.prompts_per_mini_batch=2",
        "--config.training.row_lengths=(208,)",
        "--config.training.steps=10",
        "--config.optimizer.learning_rate=0.01",
        "--config.checkpoint.every_steps=4",
        "--config.observe.samples_every_steps=1",
    ]
    process = start(run_environment, run_dir, settings, config="configs/qwen3_8b.py:local")
    _wait_for_checkpoint(run_dir, 4, process)
    process.kill()
    process.communicate()
    output = finish(start(run_environment, run_dir, settings, config="configs/qwen3_8b.py:local"))
    assert "resuming" in output
    assert sorted(read_records(run_dir)) == list(range(1, 11))

    # The prompts are rows of the file, the answers theirs.
    rows = {}
    for line in (
        (SHARED / "data/train/dapo_math_17k.jsonl").read_text(encoding="utf-8").splitlines()
    ):
        row = json.loads(line)
        rows.setdefault(row["prompt"][0]["content"], set()).add(row["reward_model"]["ground_truth"])
    samples = [
        json.loads(line)
        for line in (run_dir / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert len(samples) == 40
    assert all(sample["answer"] in rows[sample["prompt"]] for sample in samples)

    out = tmp_path / "export"
    command = [
        sys.executable,
        "-m",
        "bin.convert",
        "export",
        str(run_dir),
        str(out),
        "--dtype",
        "float32",
    ]
    subprocess.run(
        command, cwd=ROOT, env=run_environment, check=True, capture_output=True, timeout=HANGS_S
    )
    saved = find_params(run_dir)
    params = saved.load()
    model = saved.model
    step = saved.step
    assert step == 10
    ids = np.arange(2, 50, dtype=np.int32)[None]
    hidden = decoder.hidden_states(params, model, decoder.unpacked_inputs(ids), Compute())
    ours = np.asarray(hidden @ decoder.output_kernel(params))
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        theirs = exported(torch.from_numpy(ids).long()).logits.numpy()
        before = hf(torch.from_numpy(ids).long()).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert np.abs(theirs - before).max() > 1e-3  # it did train
    assert jax.tree.leaves(params)[0].dtype == jnp.float32

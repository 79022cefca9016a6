"""The recorded tokens of a run give its metrics again, and the probe reads them."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from dcmdp_jax.commands import probe
from dcmdp_jax.observe.metrics_io import read_metrics
from dcmdp_jax.probe.columns.over_training import find_files, read_run
from dcmdp_jax.probe.columns.recording_files import LeftOut
from dcmdp_jax.training.rollout_record import _by_completion, leg_metrics
from dcmdp_jax.types import Rows
from tests.support.commands import run_command
from tests.support.processes import demo
from tests.training import recorded_penalty

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = (
    "--config.warmup.steps=5",
    "--config.mesh.cpu_devices=1",
    "--config.training.steps=3",
)


def _train(environment, run_dir, *options):
    demo(run_dir, *_SMALL, *options, env=environment)
    return run_dir


@pytest.fixture(scope="module")
def run(run_environment, tmp_path_factory):
    """Twenty steps of two updates each, every step recorded.

    Lambda moves slowly enough to stay within its ends.

    The penalty is DC-GRPO's; the compiled step also writes what it penalized.
    """
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    options = (
        "observe.rollouts_every_steps=1",
        "training.steps=20",
        "algorithm.dual_learning_rate=3",
        "rollout.top_logprobs=8",
        f"algorithm.method={recorded_penalty.__file__}:dc_grpo",
        f"rewards.functions={_ROOT}/examples/length_reward.py:score",  # differs where no answer is right
    )
    environment = run_environment | {"PENALIZED_TO": str(run_dir.with_name("penalized"))}
    return _train(environment, run_dir, *(f"--config.{option}" for option in options))


def _recorded(run, step):
    return pyarrow.parquet.read_table(run / "rollouts" / f"step_{step}.parquet").to_pylist()


def test_the_recorded_tokens_give_the_runs_own_metrics(run):
    metrics = read_metrics(run)
    found = read_run(
        find_files([str(run)], LeftOut()), LeftOut(), max_tokens=10**7, metrics=metrics
    )
    names = {f"discrepancy/{name}": name for name in ("mean", "max", "p50", "p99")}
    names |= {f"mismatch/{name}": name for name in ("k1", "k3", "pearson", "effective_sample_size")}
    assert [step.step for step in found.over_training.steps] == list(range(1, 21))
    for metric, name in names.items():
        here = [getattr(step.statistics, name) for step in found.over_training.steps]
        assert here == pytest.approx(metrics[metric][1].tolist(), abs=1e-6), metric
    assert metrics["discrepancy/mean"][1].min() > 1e-5
    # Sampled by the weights that the step trained.
    assert set(found.pairs.lags.tolist()) == {0}


def test_the_recorded_lists_give_the_runs_own_measures_of_whole_states(run):
    """To what half precision of the log-ratios leaves: 2^-11 of each."""
    metrics = read_metrics(run)
    names = "total_variation", "kl_engine", "kl_trainer", "expected_discrepancy"
    names = [name for each in names for name in (each, f"{each}_bound")] + ["head_mass"]
    for step in (1, 20):
        files = find_files([str(run / f"rollouts/step_{step}.parquet")], LeftOut())
        states = read_run(files, LeftOut(), max_tokens=10**7).pairs.states
        assert (states[:, -1] == 8).all()
        for name, found in zip(names, states.mean(axis=0, dtype=np.float64), strict=False):
            assert found == pytest.approx(
                metrics[f"distribution/{name}"][1][step - 1], rel=5e-3, abs=1e-5
            ), name
    assert metrics["distribution/total_variation"][1][-1] > 1e-4


def test_the_legs_of_the_gap_are_those_of_the_first_completions(run):
    """The second leg is the whole gap.

    The embedded engine scores what it decoded to rounding.
    """
    metrics = read_metrics(run)
    step = 17
    legs = {
        name: metrics[f"mismatch/leg_{name}"] for name in ("decoding", "one_pass", "decoding_share")
    }
    assert [at.tolist() for at, _ in legs.values()] == 3 * [[1, 17]]
    p, q = (
        np.exp(
            np.concatenate([np.array(row[name])[row["mask"]] for row in _recorded(run, step)[:32]])
        )
        for name in ("train_logprobs", "rollout_logprobs")
    )
    decoding, one_pass, share = (values[-1] for _, values in legs.values())
    assert one_pass == pytest.approx(np.abs(q - p).mean(), abs=1e-6) and one_pass > 1e-5
    assert decoding < 1e-6 and abs(share) < 1e-2


def test_legs_by_hand():
    """Measures of the completion with scores, without its second token.

    q = 0.5, 0.25, s = 0.4, 0.25, p = 0.3, 0.35.
    """
    logs = {"rollout_logprobs": np.log([0.5, 1, 0.25]), "train_logprobs": np.log([0.3, 1, 0.35])}
    completions = [
        {"completion": place, "mask": np.array([True, False, True]), **logs} for place in (0, 1)
    ]
    found = leg_metrics(
        completions, np.array([0, 3]), {3: np.log([0.4, 0.1, 0.25]), 1: np.zeros(3)}
    )
    # (0.1 x 0.2 + 0) / (0.2^2 + 0.1^2)
    assert list(found.values()) == pytest.approx([0.05, 0.1, 0.4])
    assert list(found) == [
        f"mismatch/leg_{name}" for name in ("decoding", "one_pass", "decoding_share")
    ]
    assert leg_metrics(completions, np.array([0, 3]), {}) == {}


def test_every_completion_is_there_with_its_reward_and_advantage(run):
    metrics = read_metrics(run)
    config = json.loads((run / "config.json").read_text())
    size = config["rollout"]["group_size"]
    prompts = config["training"]["prompts_per_step"]
    assert prompts > config["training"]["prompts_per_mini_batch"]
    for number in range(20):
        rows = _recorded(run, number + 1)
        assert [row["completion"] for row in rows] == list(range(prompts * size))
        rewards = np.array([row["reward"] for row in rows])
        assert rewards.mean() == pytest.approx(metrics["reward/mean"][1][number], abs=1e-6)
        lengths = [sum(row["mask"]) for row in rows]
        assert np.mean(lengths) == pytest.approx(metrics["completion/length_mean"][1][number])
        groups = rewards.reshape(prompts, size)
        assert len({row["prompt_id"] for row in rows}) == prompts
        # Unbiased deviation and 1e-6, the defaults; 0 where all are equal.
        centered = groups - groups.mean(axis=1, keepdims=True)
        expected = np.where(
            np.ptp(groups, axis=1, keepdims=True) > 0,
            centered / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-6),
            0,
        )
        np.testing.assert_allclose([row["advantage"] for row in rows], expected.ravel(), atol=1e-5)


def test_the_torch_module_on_the_runs_batches_penalizes_and_moves_lambda_as_the_compiled_step_did(
    run,
):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo

    settings = json.loads((run / "config.json").read_text())["algorithm"]
    metrics = read_metrics(run)
    dc_grpo = DcGrpo(
        tolerance=settings["tolerance"],
        multiplier=settings["multiplier"],
        dual_learning_rate=settings["dual_learning_rate"],
        multiplier_max=settings["multiplier_max"],
    )
    lambdas = metrics["dual/multiplier"][1]
    by_step = recorded_penalty.read(run.with_name("penalized"))
    largest = 0.0
    learned = 0
    for number in range(20):
        rows = _recorded(run, number + 1)
        p, q, mask = (
            torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row[name]) for row in rows], batch_first=True
            )
            for name in ("train_logprobs", "rollout_logprobs", "mask")
        )
        advantages = torch.tensor([row["advantage"] for row in rows])
        penalized, found = dc_grpo.penalize(advantages, p, q, mask)
        assert found["multiplier"] == pytest.approx(lambdas[number], abs=1e-6)
        assert found["mean"] == pytest.approx(metrics["discrepancy/mean"][1][number], abs=1e-6)
        # The compiled step's own tokens of this step, told by its lambda, in the order of both
        # log-probs.
        theirs = [
            x[mask].numpy() for x in (p, q, advantages[:, None].expand(mask.shape), penalized)
        ]
        theirs = np.stack(theirs, axis=-1)
        ours = by_step[by_step[:, 0] == np.float32(lambdas[number])][:, 1:]
        assert len(ours) == len(theirs) == mask.sum() > 50
        ours, theirs = (each[np.lexsort(each.T[::-1])] for each in (ours, theirs))
        np.testing.assert_array_equal(ours[:, :3], theirs[:, :3])
        learned += np.count_nonzero(ours[:, 2])
        np.testing.assert_allclose(theirs[:, 3], ours[:, 3], rtol=0, atol=1e-6)
        largest = max(largest, float(np.abs(theirs[:, 3] - ours[:, 3]).max()))
    assert len(set(lambdas.tolist())) == 20 and learned > 100
    print(
        f"\nlambda {lambdas[0]:.4f} ... {lambdas[-1]:.4f}, largest difference of an advantage "
        f"{largest:.1e}"
    )


def test_the_probe_of_a_run_directory_names_a_cause_and_agrees(run, tmp_path, capsys):
    code, output, errors = run_command(probe.main, "probe", capsys, run, "--out", tmp_path)
    assert (code, errors) == (0, "") and "over 20 steps: mean |p - q|" in output
    [pair] = json.loads((tmp_path / "probe.json").read_text())["pairs"]
    # The columns look like rounding; the run's settings say that the engine's weights are fp8.
    assert pair["findings"][0]["cause"] == "quantized_weights" and pair["floors"]["local:fp8"] > 0
    assert pair["over_training"]["tolerance_from"] == "the run's own" and pair["source"][
        "format"
    ].startswith("dcmdp")


@pytest.mark.long
def test_the_exact_engine_is_recorded_without_mismatch_and_recording_changes_no_number(
    run_environment, tmp_path
):
    exact = "--config.rollout.precision=exact"
    recorded = _train(
        run_environment, tmp_path / "a", exact, "--config.observe.rollouts_every_steps=2"
    )
    plain = _train(
        run_environment, tmp_path / "b", exact, "--config.observe.rollouts_every_steps=0"
    )
    assert not (plain / "rollouts").exists()
    assert sorted(path.name for path in (recorded / "rollouts").iterdir()) == [
        "step_1.parquet",
        "step_3.parquet",
    ]
    found = read_run(
        find_files([str(recorded / "rollouts")], LeftOut()), LeftOut(), max_tokens=10**7
    )
    assert found.pairs.discrepancy.max() == 0 and np.exp(found.pairs.train_logprobs).std() > 0.01
    a = read_metrics(recorded)
    b = read_metrics(plain)
    for name in a:
        if not name.startswith(("time/", "throughput/")):
            np.testing.assert_array_equal(a[name][1], b[name][1], err_msg=name)


def test_values_return_to_their_completions_from_packed_rows():
    """Two mini-batches of 2 completions in two buckets.

    Completion 1 of the first lies in the second bucket.
    """

    def rows(mask, index):
        filler = np.zeros(np.shape(mask), np.int32)
        return Rows(
            filler,
            filler,
            filler,
            np.array(mask, bool),
            np.array(index, np.int32),
            filler.astype(np.float32),
        )

    # [M=2, A=1, R=1, L=4] and [M=2, A=1, R=1, L=3].
    first = rows([[[[0, 1, 1, 0]]], [[[1, 0, 1, 1]]]], [[[[0, 0, 0, 0]]], [[[1, 0, 0, 0]]]])
    second = rows([[[[1, 1, 1]]], [[[0, 0, 0]]]], [[[[1, 1, 1]]], [[[0, 0, 0]]]])
    values = np.arange(8.0).reshape(2, 1, 1, 4), 10 + np.arange(6.0).reshape(2, 1, 1, 3)
    found = _by_completion([first, second], values, 4)
    assert [each.tolist() for each in found] == [[1, 2], [10, 11, 12], [6, 7], [4]]
    # One that was dropped has no token.
    assert [len(each) for each in _by_completion([first], values[:1], 4)] == [2, 0, 2, 1]

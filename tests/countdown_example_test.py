"""examples/countdown: rewards by hand, solvable problems, SGD by AdamW, the planted sampler, the
runs of the study.
"""

import dataclasses
import json
import runpy
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from dcmdp_jax.commands.flags import parse
from dcmdp_jax.engines.engine_kind import EngineArguments
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.params import init_params, num_params
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.published import model_of
from dcmdp_jax.plan.run_plan import planned_run
from dcmdp_jax.training.optimizer import make_optimizer
from research.studies.sweep import main as sweep
from tests.support.sampling import local_engine
from tests.support.small_plan import small_config
from tests.support.vllm_tools import small_model

_ROOT = Path(__file__).resolve().parents[1]
_STUDY = "examples/countdown/countdown.py"
_GARBAGE = 10**5


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(_ROOT)


@pytest.fixture(scope="module")
def task():
    return runpy.run_path(str(_ROOT / "examples" / "countdown" / "task.py"))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("3 * 7 + 5", 1),
        ("((5)+((7)*(3)))", 1),
        ("-3 * -7 + 5", 1),  # signs are no numbers
        ("3 + 5 + 7", 0),  # another value
        ("3 * 7 + 9", 0),  # another number
        ("3 * 7 + 5 + 5 - 5", 0),  # one used three times
        ("7 * 5 - 9", 0),
        ("26", 0),
        ("3 * 7 + 5 = 26", 0),
        ("3 * 7 + 5.0", 0),
        ("7 ** 3", 0),
        ("7 // 3", 0),
        ("3 * 7 + 05", 0),
        ("3 * 7 + 5" + " " * 192, 1),  # stripped
        ("3 * 7 +" + " " * 193 + "5", 0),  # 201 characters
        ("__import__('os')", 0),
        ("(" * 100 + "3*7+5" + ")" * 95, 0),
        ("", 0),
    ],
)
def test_an_answer_by_hand(task, answer, right):
    [found] = task["countdown"]([f"<think>3*7</think><answer>{answer}</answer>"], [[3, 5, 7]], [26])
    assert found == right


@pytest.mark.parametrize(
    ("answer", "numbers", "target", "right"),
    [
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24, 1),  # 8 / (1/3); floats have 23.999999999999989
        ("6 / 4 * 2", [2, 4, 6], 3, 1),
        ("6 / (4 - 4)", [4, 4, 6], 1, 0),
        ("6 / 4", [4, 6], 1, 0),
    ],
)
def test_division_is_exact(task, answer, numbers, target, right):
    assert task["countdown"]([f"<answer>{answer}</answer>"], [numbers], [target]) == [right]


def test_the_last_answer_counts_and_a_chat_is_read(task):
    texts = [
        "<answer>1+2</answer> no: <answer>3</answer>",
        "<answer>3</answer> or <answer>1+2</answer>",
        "1+2",
    ]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    given = [[1, 2]] * 3, [3] * 3
    assert task["countdown"](texts, *given) == task["countdown"](chats, *given) == [0, 1, 0]


@pytest.mark.parametrize(
    "piece", ["<answer>", "</answer>", "(", "1+", "-", "<answer>(", "<answer>1</answer>", "9"]
)
def test_much_garbage_is_no_answer(task, piece):
    text = piece * (_GARBAGE // len(piece))
    assert task["countdown"]([text, f"<answer>{text}</answer>"], [[1, 1]] * 2, [2] * 2) == [0, 0]


def test_problems_can_be_solved_and_held_out_ones_are_not_asked(task):
    for size in (task["PUBLISHED"], task["SMALL"]):
        train, held_out = task["rows"](size, 300, 30)
        for one in train + held_out:
            # Python's own value of the answer, beside the reward's.
            assert abs(eval(one["answer"]) - one["target"]) < 1e-9
            assert task["solves"](one["answer"], one["numbers"], one["target"])
            assert all(1 <= number <= size.largest_number for number in one["numbers"])
            assert 1 <= one["target"] <= size.largest_target
        keys = [
            {(*sorted(one["numbers"]), one["target"]) for one in part} for part in (train, held_out)
        ]
        assert not keys[0] & keys[1]
    assert (
        held_out[0]["prompt"]
        == f"{' '.join(map(str, held_out[0]['numbers']))}={held_out[0]['target']}?"
    )


def test_the_published_optimizer_is_sgd_of_twice_the_rate():
    settings = parse(["train", f"--config={_STUDY}:0.6b"]).config.optimizer
    optimizer = make_optimizer(settings, optax.constant_schedule(settings.learning_rate))
    gradients = [
        np.float32([0.3, -2e-4, 5e-8]),
        np.float32([-0.1, 3e-4, 0.0]),
        np.float32([0.2, 0.0, -1e-7]),
    ]
    state = optimizer.init(gradients[0])
    for gradient in gradients:
        update, state = optimizer.update(gradient, state, gradient)
        np.testing.assert_allclose(update, -0.02 * gradient.astype(np.float64), rtol=1e-3)


def test_the_model_is_qwen3_of_600_million_parameters():
    config = parse(["train", f"--config={_STUDY}:0.6b"]).config
    assert num_params(model_of(config)) == 596_049_920
    # 64 x 8 completions in one update, 512 positions and what prompts may be longer.
    assert config.training.prompts_per_mini_batch * config.rollout.group_size == 512
    assert config.max_total_tokens == 144 + 380


def test_a_dry_run_checks_every_run(capsys, monkeypatch, tmp_path, task):
    (tmp_path / "examples").symlink_to(_ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert task["main"](["small"]) == 0
    for size in ("0.6b", "small"):
        assert sweep(["sweep", f"--study={_STUDY}:{size}", "--seeds=0", "--dry-run"]) == 0
        runs = [line for line in capsys.readouterr().out.splitlines() if ": dcmdp train " in line]
        # Eight mismatches of seven arms, exact engines with three lags, and in small a control for
        # each mismatch.
        assert len(runs) == 8 * (8 if size == "small" else 7) + 3
        assert any(
            line.startswith("stale64_dc_grpo, ") and '{"every": 65}' in line for line in runs
        )
    assert sweep(["sweep", f"--study={_STUDY}:small,noise2", "--seeds=0", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("dcmdp train") == 8
    Path("runs/countdown/small_held_out.jsonl").unlink()
    with pytest.raises(
        UserError,
        match=r"^study: evaluation of int8_grpo, seed 0: config.evaluation.task: data .*no such",
    ):
        sweep(["sweep", f"--study={_STUDY}:small", "--seeds=0", "--dry-run"])


def _samplers(**settings):
    kind = runpy.run_path(str(_ROOT / "examples" / "countdown" / "sampler.py"))["SAMPLER"]
    model = dataclasses.replace(small_model(vocab_size=104), initializer_range=0.05)
    arguments = EngineArguments(
        "float32", "float32", "auto", 64, 64, 0, kind.settings(**settings), model=model
    )
    return kind.build(arguments), local_engine(model, max_total_tokens=64), model


def test_a_sampler_takes_the_memory_of_the_embedded_engine():
    """Its own settings have no place there; the "process" part grows from call to call."""
    mesh = make_mesh(1, 8, devices=jax.devices()[:8])
    noise = {
        "rollout__engine": "examples/countdown/sampler.py:SAMPLER",
        "rollout__engine_args": '{"noise": 0.02}',
    }
    runs = [planned_run(small_config(**one), mesh) for one in ({"rollout__engine": "local"}, noise)]
    embedded, other = (
        [part for part in run.placement.engine.memory.parts if "Python" not in part.name]
        for run in runs
    )
    assert embedded == other and any("cache" in part.name for part in embedded)


def _scores(engine):
    prompt = [np.arange(9, 14, dtype=np.int32)]
    completion = [np.arange(40, 52, dtype=np.int32)]
    return engine.score(prompt, completion, temperature=1.0)[0]


def test_every_second_sync_is_taken():
    sampler, exact, model = _samplers(every=2)
    scores = []
    for version in range(4):
        params = init_params(model, jax.random.key(version))
        exact.sync_weights(params, version)
        scores.append(_scores(exact))
        sampler.sync_weights(params, version)
        np.testing.assert_allclose(_scores(sampler), scores[version // 2 * 2], atol=1e-5)
    assert np.abs(scores[2] - scores[0]).max() > 0.01


def test_the_noise_is_relative_and_the_same_at_every_sync():
    sampler, exact, model = _samplers(noise=0.05)
    noisy = runpy.run_path(str(_ROOT / "examples" / "countdown" / "sampler.py"))["noisy"]
    first, second = (init_params(model, jax.random.key(seed)) for seed in (0, 1))
    ratios = []
    for params in (first, second):
        found = jax.tree.map(
            lambda new, old: np.asarray(new / old - 1).ravel(), noisy(params, 0, 0.05), params
        )
        ratios.append(np.concatenate(jax.tree.leaves(found)))
    z = ratios[0][np.isfinite(ratios[0])] / 0.05
    assert abs(z.mean()) < 4 / np.sqrt(z.size) and abs(z.var() - 1) < 4 * np.sqrt(2 / z.size)
    both = np.isfinite(ratios[0]) & np.isfinite(ratios[1])
    np.testing.assert_allclose(ratios[0][both], ratios[1][both], atol=1e-5)
    for version, params in enumerate((first, second)):
        sampler.sync_weights(params, version)
        exact.sync_weights(noisy(params, 0, 0.05), version)
        np.testing.assert_allclose(_scores(sampler), _scores(exact), atol=1e-5)


def test_rows_are_json_with_the_columns_that_the_reward_reads(task):
    row = json.loads(json.dumps(task["rows"](task["PUBLISHED"], 1, 1)[0][0]))
    asked = row["prompt"][-1]["content"]
    assert f"numbers {row['numbers']}, " in asked and f" equals {row['target']}." in asked

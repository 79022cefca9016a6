"""On-policy distillation: the gradient of the reverse KL, and teachers of several kinds.

One of another shape, one on a server; resume and refusals.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.base import get_config
from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.engines.http import HttpKind
from dcmdp_jax.parallel.hosts import ONE_PROCESS
from dcmdp_jax.rewards.scoring import BatchScoring, RewardScorer, reward_metrics
from dcmdp_jax.run.run import Run
from dcmdp_jax.training import rollout_sampler
from dcmdp_jax.training.exit import CollectiveExit, StopSignal
from dcmdp_jax.training.objective import distillation, token_advantages
from dcmdp_jax.training.phase_timer import PhaseTimer
from dcmdp_jax.training.rollout_sampler import StepRollouts
from dcmdp_jax.training.teacher import make_teacher
from dcmdp_jax.types import Rows
from tests.support.runs import finish, read_digests, read_records, start
from tests.support.small_task import (
    EchoEngine,
    ParityScoring,
    small_services,
    small_session,
    small_task,
)

_SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=8
)


def _save_teacher(directory, tokenizer=None, **changes):
    """A random Llama of transformers with the built-in tokenizer.

    Of another shape and family than the demo's policy.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    tokenizer = tokenizer or build_tokenizer()
    sizes = _SIZES | dict(num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3)
    sizes |= {"vocab_size": len(tokenizer), **changes}
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", tie_word_embeddings=False, **sizes, **ends)
    )
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def test_the_mean_over_the_policys_tokens_is_the_gradient_of_the_reverse_kl():
    generator = np.random.default_rng(0)
    logits, teacher = (jnp.asarray(generator.normal(size=7), jnp.float32) for _ in range(2))
    teacher = jax.nn.log_softmax(teacher)

    def expected_gain(logits, weight=0.5):
        """sum_y p(y) A_y log pi(y) over the whole vocabulary.

        Every token is sampled once, as a completion of a row of its own.
        """
        old = jax.lax.stop_gradient(jax.nn.log_softmax(logits))
        place = np.arange(7)[:, None]
        mask = np.ones((7, 1), bool)
        rows = Rows(*[place] * 3, mask, place, {"teacher_logprobs": teacher[:, None]})
        rewards = token_advantages(jnp.full(7, 2.0), rows, old[:, None], distillation("a", weight))[
            :, 0
        ]
        return jnp.sum(jnp.exp(old) * rewards * jax.nn.log_softmax(logits))

    def divergence(logits):
        own = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(own) * (own - teacher))

    # A_i = 2 of all alike has no gradient. That of the forward KL, p - p_T, is another one.
    gradient = jax.grad(expected_gain)(logits)
    np.testing.assert_allclose(gradient, -0.5 * jax.grad(divergence)(logits), atol=1e-6)
    assert np.abs(gradient + 0.5 * (jax.nn.softmax(logits) - jnp.exp(teacher))).max() > 0.02


def test_without_a_teacher_a_token_has_its_completions_advantage():
    index = np.array([[0, 0, 1]])
    rows = Rows(index, index, index, index >= 0, index, {})
    found = token_advantages(
        np.array([1.5, -2.0]), rows, np.full((1, 3), -9.0), distillation("", 0.0)
    )
    np.testing.assert_array_equal(found, [[1.5, 1.5, -2.0]])


_SETTINGS = {"model.compute_dtype": "float32", "evaluation.every_steps": 0}
_SETTINGS |= {"mesh.data": 2, "mesh.fsdp": 4, "mesh.tensor": 1}


def _checked(tmp_path, functions, changes=()):
    settings = {
        "run_dir": str(tmp_path / "run"),
        "rewards.functions": functions,
        **_SETTINGS,
        **dict(changes),
    }
    return Run.check(load_config("demo:debug", settings))


@pytest.fixture
def rows_of(monkeypatch):
    """A step of a run up to its scores: (task, placement, state), the batch and its rows."""
    from dcmdp_jax.training.batches import Batches
    from dcmdp_jax.training.state import initial_dual
    from dcmdp_jax.training.step_programs import make_step_programs

    def made(run):
        task = run.task
        placement = run.placement
        programs = make_step_programs(task.config, task.model, placement)
        state = programs.create(run.weights.initial(), initial_dual(task.config.algorithm))
        with run.start() as services:
            leave = CollectiveExit(ONE_PROCESS, StopSignal(), lambda: 0)
            session = small_session(task, placement, programs, leave)
            batches = Batches(session, services, make_teacher(task, placement))
            batches.sync_weights(state.params, 0, PhaseTimer())
            batch = batches.make(state, 0, PhaseTimer()).batch
            before = jax.device_get(state.params)
            after, metrics, _ = programs.train_step(state, batch, None)
        return jax.device_get(batch), jax.device_get(metrics), before, jax.device_get(after.params)

    return made


def test_a_teacher_of_another_shape_scores_as_transformers_does(tmp_path, rows_of):
    import torch

    model = _save_teacher(tmp_path / "teacher")
    run = _checked(tmp_path, f"teacher:{tmp_path / 'teacher'}", {"rewards.weights": (0.25,)})
    batch, metrics, *_ = rows_of(run)
    temperature = run.task.config.rollout.temperature
    gaps = 0.0
    count = 0
    for bucket in batch.rows:
        flat = [np.reshape(x, (-1, x.shape[-1])) for x in bucket[:4]]
        found = np.reshape(bucket.columns["teacher_logprobs"], flat[0].shape)
        for ids, _, segments, mask, own in zip(*flat, found, strict=True):
            for segment in range(1, segments.max() + 1):
                here = segments == segment
                with torch.no_grad():
                    logits = model(torch.tensor(ids[here])[None].long()).logits[0] / temperature
                expected = torch.log_softmax(logits, -1)[:-1].gather(
                    1, torch.tensor(ids[here][1:])[:, None].long()
                )
                sampled = mask[here][1:]
                np.testing.assert_allclose(
                    own[here][1:][sampled], expected.numpy()[sampled, 0], atol=2e-5
                )
                gaps = gaps - expected.numpy()[sampled, 0].sum()
                count = count + sampled.sum()
            assert not own[~mask].any()
    assert count > 50
    # The demo's fresh policy is nearly uniform: its own mean log-prob is -log V; the weight is not
    # in the metric.
    uniform = np.log(run.task.model.vocab_size)
    assert metrics["policy/teacher_kl"] == pytest.approx(gaps / count - uniform, abs=0.1)
    # All rewards are 0: without the teacher's nothing would be learned.
    assert metrics["reward/all_equal_groups"] == 1 and metrics["optimizer/grad_norm"] > 0.01
    part = next(part for part in run.placement.engine.memory.parts if part.name == "teacher")
    # Float32; mesh.data holds it twice, mesh.fsdp in parts. A CPU's devices are the host.
    assert part.host == pytest.approx(2 * 4 * sum(x.numel() for x in model.parameters()), rel=0.1)


def test_a_policy_that_is_its_own_teacher_stays(tmp_path, rows_of):
    from dcmdp_jax.models.hf_weights import save_params

    run = _checked(tmp_path, "math")
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    save_params(
        run.weights.initial(),
        run.task.model,
        tmp_path / "self",
        dtype="float32",
        tokenizer_dir=tmp_path / "tokenizer",
    )
    changes = {
        "algorithm.method": "grpo",
        "training.prompts_per_mini_batch": run.task.config.training.prompts_per_step,
    }
    _, metrics, before, after = rows_of(_checked(tmp_path, f"teacher:{tmp_path / 'self'}", changes))
    assert abs(metrics["policy/teacher_kl"]) < 1e-6 and metrics["optimizer/grad_norm"] < 1e-5


def test_bypass_compares_the_teacher_with_the_policy_that_sampled(tmp_path, rows_of):
    _save_teacher(tmp_path / "teacher")
    found = {}
    for name in ("train", "bypass"):
        changes = {"algorithm.ratio_denominator": name, "optimizer.learning_rate": 0.03}
        metrics = rows_of(_checked(tmp_path, f"teacher:{tmp_path / 'teacher'}", changes))[1]
        found[name] = float(metrics["policy/teacher_kl"])
    # With the weights that the first of two updates moved it would be another number.
    assert found["bypass"] == pytest.approx(found["train"], abs=1e-6)


def test_a_resumed_run_with_a_teacher_has_the_bits_of_one_that_went_on(run_environment, tmp_path):
    _save_teacher(tmp_path / "teacher")
    settings = [
        f"--config.rewards.functions=math,teacher:{tmp_path / 'teacher'}",
        "--config.rewards.weights=(0,1)",
        "--config.rollout.lag=1",
        "--config.evaluation.every_steps=2",
        "--config.evaluation.max_problems=4",
        "--config.checkpoint.every_steps=1",
        "--config.mesh.cpu_devices=1",
    ]
    two_steps = [*settings, "--config.training.steps=2"]
    three_steps = [*settings, "--config.training.steps=3"]
    finish(start(run_environment, tmp_path / "whole", three_steps))
    finish(start(run_environment, tmp_path / "run", two_steps))
    finish(start(run_environment, tmp_path / "run", three_steps))
    assert read_digests(tmp_path / "run", 3) == read_digests(tmp_path / "whole", 3)
    records = read_records(tmp_path / "whole")
    resumed = read_records(tmp_path / "run")
    assert resumed[3]["policy/teacher_kl"] == records[3]["policy/teacher_kl"] > 0
    # A weight of 0 leaves math to evaluation, which has no teacher.
    scores = [
        value for name, value in records[2].items() if name.startswith("eval/") and "/avg@" in name
    ]
    assert scores and records[1]["reward/mean"] == 0 <= records[1]["reward/math/mean"]


def test_a_server_scores_each_completion_after_its_prompt(monkeypatch):
    monkeypatch.setattr(rollout_sampler, "BatchScoring", ParityScoring)
    task = small_task(6, training={"prompts_per_step": 4})
    leave = CollectiveExit(ONE_PROCESS, StopSignal(), lambda: 0)
    services = dataclasses.replace(small_services(EchoEngine()), teacher=EchoEngine(scored=2.0))
    rollout = StepRollouts(services, task, ONE_PROCESS, leave).sample(0, 0, PhaseTimer())
    found = [episode.columns["teacher_logprobs"] for episode in rollout.episodes]
    # The prompt's token, then the completion's: -0.1 times the member, less 2.
    np.testing.assert_allclose(found, [[0, -2.0], [0, -2.1]] * 4, rtol=1e-6)


def test_a_server_is_asked_about_the_policys_tokens_at_the_start(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(HttpKind, "build", lambda self, arguments: asked.append(arguments))
    run = _checked(tmp_path, "teacher:http://localhost:8000", {"rollout.temperature": 1.0})
    assert run.task.teacher is None and "teacher_logprobs" in run.placement.columns
    with run.start():
        pass
    [arguments] = asked
    assert (
        arguments.settings.server == "http://localhost:8000" and arguments.model == run.task.model
    )
    # vLLM scores a row in a context that has one more: a server of exactly the run's stops it at a
    # full completion.
    assert arguments.max_total_tokens == run.task.config.max_total_tokens + 1


def test_a_batch_that_only_a_teacher_rewards_has_zeros():
    problems = small_task(3).train.problems
    scorer = RewardScorer((), None, (), by_source=False, timeout_s=1.0, stop_on_error=True)
    scoring = BatchScoring(scorer, build_tokenizer(), problems)
    scoring.begin([0, 1, 2], [np.array([5], np.int32)] * 3)
    _, scores = scoring.finish()
    np.testing.assert_array_equal(scores.totals, [0, 0, 0])
    assert reward_metrics(scores) == {"reward/without_value": 0} and not scorer._warned
    scorer.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rewards.functions": "teacher:"},
            "rewards.functions: got 'teacher:', allowed are math, .*, teacher:MODEL, ",
        ),
        (
            {"rewards.functions": "teacher:a,teacher:b"},
            "rewards.functions: got .*, must name one teacher at most",
        ),
        (
            {"algorithm.drop_equal_groups": True},
            "algorithm.drop_equal_groups: got True, must be False with a teacher",
        ),
        (
            {"rewards.functions": "teacher:http://h:1", "rollout.temperature": 0.8},
            "rollout.temperature: got 0.8, must be 1, with top_p=1 and top_k=0: a teacher's server",
        ),
    ],
)
def test_settings_that_do_not_fit_a_teacher_are_refused(changes, said):
    config = get_config()
    for name, value in {
        "task.train": "x",
        "rewards.functions": "math,teacher:m",
        **changes,
    }.items():
        config.update_from_flattened_dict({name: value})
    with pytest.raises(ValueError, match=f"^config.{said}"):
        from_config_dict(config)


def test_a_teacher_that_knows_more_is_taken_and_its_other_end_is_said_once(tmp_path, caplog):
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    _save_teacher(
        tmp_path / "more", tokenizer, vocab_size=112
    )  # rows beyond both vocabularies, too
    assert _checked(tmp_path, f"teacher:{tmp_path / 'more'}").task.teacher.vocab_size == 112
    assert "ends with" not in caplog.text
    own = tokenizer.eos_token_id
    other = tokenizer.convert_tokens_to_ids("<more>")
    for ends in ([own, other], other):
        caplog.clear()
        path = tmp_path / "more" / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": ends}))
        _checked(tmp_path, f"teacher:{tmp_path / 'more'}")
        (line,) = [record.message for record in caplog.records if "ends with" in record.message]
        assert f"ends with '<more>' ({other}), at which a completion of the policy goes on" in line
        assert f"(it ends with {tokenizer.eos_token!r} ({own}))" in line and line.endswith(
            "ends as the policy does"
        )


def test_a_policy_that_ends_where_its_teacher_does_as_well_is_not_warned_of(tmp_path, caplog):
    tokenizer = build_tokenizer()
    _save_teacher(tmp_path / "policy", tokenizer)
    _save_teacher(tmp_path / "teacher", tokenizer)
    text = tokenizer.convert_ids_to_tokens(7)
    policy = {"model.path": str(tmp_path / "policy")}
    for directory, ends, warned in (
        ("teacher", [7], True),
        ("policy", [7, tokenizer.eos_token_id], False),
    ):
        (tmp_path / directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": ends})
        )
        caplog.clear()
        _checked(tmp_path, f"teacher:{tmp_path / 'teacher'}", policy)
        lines = [record.message for record in caplog.records if "ends with" in record.message]
        assert len(lines) == warned
        if warned:
            assert f"ends with {text!r} (7), at which" in lines[0]
            assert (
                f"set eos_token_id to [{tokenizer.eos_token_id}, 7] in generation_config.json of "
                "model.path" in lines[0]
            )


def test_a_teacher_that_knows_other_tokens_or_fewer_places_is_refused(tmp_path):
    _save_teacher(tmp_path / "teacher")
    path = tmp_path / "teacher" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 20}))
    name = f"teacher:{tmp_path / 'teacher'}"
    with pytest.raises(
        ValueError, match=r"^config.rewards.functions: the teacher .* reads fewer tokens than \d+$"
    ):
        _checked(tmp_path, name)
    path.write_text(json.dumps({**config, "vocab_size": config["vocab_size"] - 1}))
    with pytest.raises(
        ValueError,
        match="^config.rewards.functions: the teacher .* has an embedding of 103 rows, the",
    ):
        _checked(tmp_path, name)
    path.write_text(json.dumps(config))
    written = json.loads((tmp_path / "teacher" / "tokenizer.json").read_text())
    words = written["model"]["vocab"]
    first, second = sorted(words, key=words.get)[50:52]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "teacher" / "tokenizer.json").write_text(json.dumps(written))
    said = (
        f"has another vocabulary: token {words[second]} of the policy is {first!r}, the "
        f"teacher has {second!r} there"
    )
    with pytest.raises(
        ValueError, match=f"^config.rewards.functions: the teacher .* {re.escape(said)}$"
    ):
        _checked(tmp_path, name)
    with pytest.raises(
        ValueError,
        match="^config.rewards.functions: evaluation needs another reward than a teacher",
    ):
        _checked(tmp_path, name, {"evaluation.every_steps": 1})

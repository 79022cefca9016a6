"""Supervised fine-tuning has the loss of transformers, however conversations lie in rows.

Killed runs go on exactly.
"""

import dataclasses
import json
import signal
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.config.load import for_supervision
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.conversation_batches import Conversations
from dcmdp_jax.training.rescore import make_old_logprobs
from dcmdp_jax.training.state import initial_dual
from dcmdp_jax.training.step_programs import make_step_programs
from tests.support.runs import finish, read_digests, read_records, start

_TALK = [
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+2?"},
]
_ROWS = [
    {"prompt": "1+2=?", "completion": "1+2=3;\\boxed{3}"},
    {"messages": [*_TALK, {"role": "assistant", "content": "it is 4"}]},
    {"question": "2+2=?", "answer": "2+2=4;\n#### 4"},
    {
        "prompt": _TALK[:1],
        "completion": [{"role": "assistant", "content": "two, as one and one is two"}],
    },
    {"prompt": "9-3=?", "completion": "6"},
    {"prompt": "3-3=?", "completion": "0"},
]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    return path


def _model(directory, kind):
    """A random model of transformers with the built-in tokenizer, written to a directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def _conversations(rows, directory, segments):
    """The batches of a run of one update a step on all rows, its programs and its state."""
    settings = {
        "model.path": str(directory),
        "model.compute_dtype": "float32",
        "task.train": str(rows),
        "run_dir": str(rows.parent / "run"),
        "training.prompts_per_step": 6,
        "training.prompts_per_mini_batch": 6,
        "training.segments_per_row": segments,
        "training.row_lengths": (200,),
        "training.micro_batch_tokens": 400,
        "mesh.data": 2,
        "mesh.fsdp": 1,
        "mesh.tensor": 4,
        "evaluation.every_steps": 0,
    }
    config = for_supervision(load_config("demo:debug", settings))
    run = Run.check(config)
    programs = make_step_programs(config, run.task.model, run.placement)
    state = programs.create(run.weights.initial(), initial_dual(config.algorithm))
    setup = programs.setup
    old_logprobs = make_old_logprobs(setup.row_logprobs, mesh=setup.mesh)
    session = SimpleNamespace(
        run=run,
        config=config,
        programs=dataclasses.replace(programs, old_logprobs=old_logprobs),
        state=state,
        frozen=None,
        leave_if_asked=lambda: None,
    )
    return Conversations(session), run.task, programs, state


def _trained(conversations, programs, state):
    """Loss, gradient norm and parameters of one step, and how many rows hold something."""
    _, packed = conversations.of_step(0)
    after, metrics, _ = programs.train_step(state, packed.on_devices, None)
    used = 0
    for bucket in packed.on_host.rows:
        used += int(np.any(bucket.completion_mask, axis=-1).sum())
    return (
        float(metrics["policy/loss"]),
        float(metrics["optimizer/grad_norm"]),
        jax.device_get(after.params),
        used,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_loss_is_that_of_transformers_packed_or_not(rows, tmp_path, kind):
    import torch

    model = _model(tmp_path / "model", kind)
    results = {}
    for segments in (1, 6):
        conversations, task, programs, state = _conversations(rows, tmp_path / "model", segments)
        train = task.train
        held = conversations.mean_loss(train)
        results[segments] = held, *_trained(conversations, programs, state)
    total = 0.0
    count = 0
    for ids, targets in zip(train.token_ids, train.targets, strict=True):
        labels = torch.tensor(np.where(targets, ids, -100))[None].long()
        with torch.no_grad():
            found = model(torch.tensor(ids)[None].long(), labels=labels).loss
        total = total + float(found) * int(targets.sum())
        count = count + int(targets.sum())
    assert count == sum(int(targets.sum()) for targets in train.targets) and count > 60
    for held, loss, *_ in results.values():
        # A mean of the conversations' means would give the answers of one digit a third of the
        # weight.
        assert held == pytest.approx(total / count, abs=1e-5) and loss == pytest.approx(
            total / count, abs=1e-5
        )
    (_, _, alone, one, used), (_, _, packed, other, fewer) = results.values()
    assert used == 6 and fewer < 6 and packed == pytest.approx(alone, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), one, other)


# dcmdp sft; dies as it writes the metrics of step 3.
_KILLED = """
import os, signal, sys
from dcmdp_jax.commands import failures, sft
from dcmdp_jax.observe.metrics_io import MetricsWriter

write = MetricsWriter.write
MetricsWriter.write = lambda self, step, metrics: (
    os.kill(os.getpid(), signal.SIGKILL) if step == 3 else write(self, step, metrics)
)
failures.run_main(sft.main)
"""


@pytest.mark.parametrize(
    "settings",
    [(), pytest.param(("model.lora_rank=2",), marks=pytest.mark.long)],
    ids=["all", "lora"],
)
def test_a_killed_run_goes_on_to_the_same_bits(run_environment, tmp_path, rows, settings):
    settings = [
        f"task.train={rows}",
        f"evaluation.task={rows}",
        "evaluation.every_steps=2",
        "training.steps=4",
        "checkpoint.every_steps=1",
        "optimizer.learning_rate=1e-3",
        "mesh.cpu_devices=1",
        *settings,
    ]
    words = [f"--config.{setting}" for setting in settings]
    output = finish(start(run_environment, tmp_path / "whole", words, program=("-m", "bin.sft")))
    assert "6 to learn from (0 dropped: too long)" in output
    assert "4 conversations, 2 update(s)" in output
    finish(
        start(run_environment, tmp_path / "run", words, program=("-c", _KILLED)),
        code=-signal.SIGKILL,
    )
    output = finish(start(run_environment, tmp_path / "run", words, program=("-m", "bin.sft")))
    assert f"resuming {tmp_path / 'run'} after step 2" in output
    assert read_digests(tmp_path / "run", 4) == read_digests(tmp_path / "whole", 4)
    records = read_records(tmp_path / "whole")
    assert read_records(tmp_path / "run") == records
    losses = [records[step]["eval/rows/loss"] for step in (0, 2, 4)]
    assert (
        losses == sorted(losses, reverse=True) and losses[0] > 4 and "reward/mean" not in records[1]
    )
    # Another run's settings are refused: training by rewards would go on from these weights.
    refused = finish(start(run_environment, tmp_path / "run", words), code=2)
    assert "holds a run with" in refused
    # The tokens are the same, but "2" is no longer learned.
    talk = [_TALK[0], {**_TALK[1], "weight": 0}, _TALK[2], _ROWS[1]["messages"][-1]]
    changed = [*_ROWS[:1], {"messages": talk}, *_ROWS[2:]]
    rows.write_text("".join(json.dumps(row) + "\n" for row in changed))
    longer = [*words, "--config.training.steps=5"]
    refused = finish(
        start(run_environment, tmp_path / "run", longer, program=("-m", "bin.sft")), code=2
    )
    assert "config.task.train: has 6" in refused and "put the data back, or set" in refused


def test_a_row_without_an_assistants_turn_is_one_line_before_any_device_starts(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(_ROWS[0]) + "\n" + json.dumps({"messages": _TALK[:1]}) + "\n")
    config = for_supervision(
        load_config("demo:debug", {"task.train": str(path), "run_dir": str(tmp_path / "run")})
    )
    with pytest.raises(
        ValueError, match=r"^config\.task\.train: .*rows\.jsonl:2: field 'messages' has no turn of"
    ):
        Run.check(config)


def test_what_the_settings_say_of_engine_and_teacher_does_not_count(rows, tmp_path):
    given = {"task.train": str(rows), "evaluation.task": str(rows), "evaluation.every_steps": 1}
    given |= {
        "run_dir": str(tmp_path / "run"),
        "rollout.precision": "int8",
        "model.forward_precision": "int8",
    }
    given |= {
        "model.compute_dtype": "float32",
        "training.prompts_per_step": 8,
        "training.prompts_per_mini_batch": 8,
    }
    config = for_supervision(
        load_config("demo:debug", given | {"rewards.functions": "teacher:/nowhere"})
    )
    task = Run.check(config).task
    assert len(task.held_out[0][1].targets) == 6 and config.model.forward_precision == "full"

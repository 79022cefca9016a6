"""TRL's own trainer with DC-GRPO on the arithmetic task, 20 steps: lambda and advantages as our
functions give them.
"""

import copy
import functools
import json
import math
import os
import re
import runpy
import textwrap
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "trl",
    reason="TRL is not installed; benchmarks/results/hooks.txt has the command that runs this",
)
pytest.importorskip("torch", reason="torch is not installed")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax.numpy as jnp  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from dcmdp_jax.algorithm.advantages import group_advantages  # noqa: E402
from dcmdp_jax.algorithm.discrepancy import token_discrepancy  # noqa: E402
from dcmdp_jax.algorithm.dual import dual_update  # noqa: E402
from dcmdp_jax.algorithm.penalties import dc_grpo as penalty  # noqa: E402
from dcmdp_jax.algorithm.remedies import Tokens  # noqa: E402
from dcmdp_jax.data.arithmetic import (  # noqa: E402
    ArithmeticSpec,
    arithmetic_rows,
    build_tokenizer,  # noqa: E402
)
from dcmdp_jax.integrations import trl_trainer  # noqa: E402
from dcmdp_jax.integrations.dc_grpo_torch import STATE_FILE, DcGrpo  # noqa: E402
from dcmdp_jax.integrations.trl_trainer import DcGrpoTrainer  # noqa: E402
from dcmdp_jax.record import Recorder, record_trl  # noqa: E402

STEPS = 20
GROUP = 8
PROMPTS = 4
TOKENS = 24
SETTINGS = {
    "tolerance": 0.016,
    "dual_learning_rate": 10.0,
    "multiplier_min": 0.0,
    "multiplier_max": 1.0,
}
START = 0.3


class RoundedEngine:
    """Samples from the trainer's weights rounded to 4 bits of mantissa, and reports its log-probs:
    a coarse engine.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, prompts, trainer):
        # Not a deep copy: accelerate has put a bound method of the trainer's own model into it.
        engine = Qwen3ForCausalLM(trainer.model.config).float().eval()
        engine.load_state_dict(trainer.model.state_dict())
        with torch.no_grad():
            for parameter in engine.parameters():
                mantissa, exponent = torch.frexp(parameter)
                parameter.copy_(torch.ldexp((mantissa * 16).round() / 16, exponent))
        result = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
        for length in sorted({len(each) for each in ids}):
            rows = [row for row, each in enumerate(ids) if len(each) == length]
            self._sample(engine, [ids[row] for row in rows], rows, result)
        order = np.argsort(result.pop("rows"))
        return {name: [values[i] for i in order] for name, values in result.items()}

    def _sample(self, engine, ids, rows, result):
        sequences = torch.tensor(ids)
        logprobs = []
        with torch.no_grad():
            for _ in range(TOKENS):
                step = engine(sequences).logits[:, -1].float().log_softmax(-1)
                token = torch.multinomial(step.exp(), 1)
                logprobs.append(step.gather(1, token))
                sequences = torch.cat([sequences, token], dim=1)
        logprobs = torch.cat(logprobs, dim=1)
        for each, sampled, values, row in zip(
            ids, sequences[:, len(ids[0]) :].tolist(), logprobs, rows, strict=True
        ):
            end = (
                sampled.index(self.tokenizer.eos_token_id) + 1
                if self.tokenizer.eos_token_id in sampled
                else TOKENS
            )
            result["prompt_ids"].append(each)
            result["completion_ids"].append(sampled[:end])
            result["logprobs"].append(values[:end].tolist())
            result.setdefault("rows", []).append(row)


def _reward(completions, solution, **_):
    """The share of the worked solution that the completion begins with: 1 is a solved problem."""
    pairs = zip(completions, solution, strict=True)
    return [len(os.path.commonprefix(pair)) / len(pair[1]) for pair in pairs]


@functools.cache
def _problems():
    rows = arithmetic_rows(ArithmeticSpec(difficulty=1, count=64))
    return [{"prompt": row["prompt"][0]["content"], "solution": row["solution"]} for row in rows]


@functools.cache
def _warmed_up():
    """A small model after a supervised start on worked solutions: it knows their form and errs."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
    )
    heads = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    config = Qwen3Config(**sizes, **heads, **ends)
    model = Qwen3ForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = [row["prompt"] + row["solution"] + tokenizer.eos_token for row in _problems()]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for _ in range(150):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _trainer(path, steps, on_batch, dc_grpo, reward=_reward):
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    data = Dataset.from_list(_problems())
    off = "bf16 gradient_checkpointing dataloader_pin_memory shuffle_dataset"
    batch = dict(
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
    )
    batch |= dict(gradient_accumulation_steps=1, max_steps=steps, seed=0) | dict.fromkeys(
        off.split(), False
    )
    loss = dict(learning_rate=1e-4, lr_scheduler_type="constant", beta=0.0, loss_type="grpo")
    said = dict(
        report_to="none", logging_steps=1, disable_tqdm=True, save_strategy="steps", save_steps=10
    )
    arguments = GRPOConfig(output_dir=str(path), use_cpu=True, **batch, **loss, **said)
    task = dict(reward_funcs=reward, train_dataset=data, processing_class=tokenizer)
    ours = dict(dc_grpo=dc_grpo, on_batch=on_batch, rollout_func=RoundedEngine(tokenizer))
    return DcGrpoTrainer(model=copy.deepcopy(_warmed_up()), args=arguments, **task, **ours)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Twenty steps of TRL's trainer, with every batch it trained on."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("trl")
    batches = []
    recorder = Recorder(path / "recordings", "trl")

    def keep(step, output, train):
        record_trl(recorder, step, output, train)
        names = ("completion_ids", "completion_mask", "sampling_per_token_logps", "advantages")
        batches.append({name: output[name].detach().numpy().copy() for name in names})
        batches[-1] |= {"rewards": np.array(rewarded[-1], np.float32)}
        batches[-1] |= {"train": train.detach().numpy().copy(), "after": dc_grpo.multiplier}

    def reward(**arguments):
        rewarded.append(_reward(**arguments))
        return rewarded[-1]

    dc_grpo = DcGrpo(multiplier=START, **SETTINGS)
    rewarded = []
    trainer = _trainer(path, STEPS, keep, dc_grpo, reward)
    trainer.train()
    return path, trainer, batches


def test_lambda_and_advantages_of_twenty_steps_are_those_of_our_functions(run):
    _, _, batches = run
    assert len(batches) == STEPS
    multiplier = START
    lambdas = []
    largest = 0.0
    for batch in batches:
        mask = batch["completion_mask"].astype(bool)
        rewards = batch["rewards"]
        groups = np.repeat(np.arange(PROMPTS), GROUP)
        # TRL divides by the unbiased deviation + 1e-4.
        advantages = group_advantages(
            jnp.asarray(rewards, jnp.float32),
            groups,
            np.ones(len(groups), bool),
            ddof=1,
            epsilon=1e-4,
        )
        delta = token_discrepancy(
            batch["train"], batch["sampling_per_token_logps"], measure="diff", sided="two"
        )
        delta = jnp.where(mask, delta, 0.0)
        rows = jnp.broadcast_to(jnp.asarray(advantages)[:, None], delta.shape)
        ours = penalty(Tokens(advantages=rows, discrepancy=delta, multiplier=multiplier))
        np.testing.assert_allclose(
            batch["advantages"][mask], np.asarray(ours)[mask], rtol=0, atol=1e-6
        )
        # The penalty itself, apart from the order in which the two add up a group's mean.
        base = batch["advantages"] + multiplier * np.asarray(delta)
        row = base.max(axis=1, keepdims=True)
        np.testing.assert_allclose(base, np.broadcast_to(row, base.shape), rtol=0, atol=1e-6)
        largest = max(largest, float(np.abs(batch["advantages"] - np.asarray(ours))[mask].max()))
        multiplier = float(dual_update(multiplier, float(delta.sum() / mask.sum()), **SETTINGS))
        assert batch["after"] == pytest.approx(multiplier, abs=1e-6)
        lambdas.append(multiplier)
    print(
        f"\nlambda {lambdas[0]:.4f} ... {lambdas[-1]:.4f}, largest difference of an advantage "
        f"{largest:.1e}"
    )
    assert len(set(lambdas)) == STEPS and max(lambdas) - min(lambdas) > 0.02, "lambda stood still"


def test_the_metrics_are_logged_and_the_state_is_beside_each_checkpoint(run):
    path, trainer, batches = run
    logged = [entry for entry in trainer.state.log_history if "dc_grpo/multiplier" in entry]
    assert len(logged) == STEPS and logged[0]["dc_grpo/multiplier"] == START
    state = json.loads((path / "checkpoint-10" / STATE_FILE).read_text())
    assert len(state["history"]) == 10 and state["multiplier"] == batches[9]["after"]


def test_a_resumed_run_takes_lambda_from_its_checkpoint(run, tmp_path):
    path, _, batches = run
    dc_grpo = DcGrpo(multiplier=START, **SETTINGS)
    used = []
    trainer = _trainer(tmp_path, 11, lambda *_: used.append(len(dc_grpo.history)), dc_grpo)
    trainer.train(resume_from_checkpoint=str(path / "checkpoint-10"))
    assert used == [11]
    logged = [entry for entry in trainer.state.log_history if entry.get("step") == 11]
    assert logged[0]["dc_grpo/multiplier"] == pytest.approx(batches[9]["after"], abs=1e-9)


def test_an_engine_without_logprobs_is_refused(tmp_path):
    trainer = _trainer(tmp_path, 1, None, DcGrpo(multiplier=START, **SETTINGS))
    engine = trainer.rollout_func
    trainer.rollout_func = lambda *arguments: engine(*arguments) | {"logprobs": None}
    with pytest.raises((ValueError, TypeError), match="sampling_per_token_logps|rollout_func"):
        trainer.train()


def test_the_probe_reads_what_the_trainer_recorded(run):
    from dcmdp_jax.probe.columns.over_training import find_files, read_run
    from dcmdp_jax.probe.columns.recording_files import LeftOut

    path, _, batches = run
    files = find_files([str(path / "recordings")], LeftOut())
    found = read_run(files, LeftOut(), max_tokens=10**6)
    assert files[0].framework == "trl" and [
        step.step for step in found.over_training.steps
    ] == list(range(STEPS))
    for step, batch in zip(found.over_training.steps, batches, strict=True):
        mask = batch["completion_mask"].astype(bool)
        p, q = (
            np.exp(batch[name][mask].astype(np.float64))
            for name in ("train", "sampling_per_token_logps")
        )
        assert step.statistics.mean == pytest.approx(np.abs(p - q).mean(), abs=1e-7)
    assert (
        not math.isnan(found.over_training.tolerance)
        and Path(path / "recordings" / "step_0").is_dir()
    )


def test_the_class_of_the_page_records_each_batch_with_its_weighted_reward(tmp_path, monkeypatch):
    page = Path(__file__).resolve().parents[2] / "docs" / "probe.md"
    block = re.search(r"^TRL, with (?:.+\n)+\n((?:    .*\n|\n)+)", page.read_text(), re.M).group(1)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(textwrap.dedent(block), names)
    tokenizer = build_tokenizer()
    # With two updates a batch TRL keeps the old log-probs, as it does with vLLM.
    sizes = dict(per_device_train_batch_size=8, num_generations=4, max_completion_length=TOKENS)
    arguments = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=2,
        num_iterations=2,
        reward_weights=[0.5, 2.0],
        **sizes,
    )
    trainer = names["Recorded"](
        model=copy.deepcopy(_warmed_up()),
        args=arguments,
        train_dataset=Dataset.from_list(_problems()),
        processing_class=tokenizer,
        reward_funcs=[_reward, lambda completions, **_: [1.0] * len(completions)],
        rollout_func=RoundedEngine(tokenizer),
    )
    trainer.train()
    files = sorted((tmp_path / "recordings").rglob("*.jsonl"))
    rewards = [json.loads(line)["reward"] for line in files[0].open()]
    logged = trainer.state.log_history[0]
    assert len(rewards) == 8 and min(rewards) >= 2.0
    assert np.mean(rewards) == pytest.approx(logged["reward"], abs=1e-6)


def test_the_fused_loss_of_liger_is_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False)
    args.use_liger_kernel = True
    with pytest.raises(
        ValueError, match="DcGrpoTrainer: use_liger_kernel=True: its fused loss takes no advantage"
    ):
        DcGrpoTrainer(dc_grpo=DcGrpo(**SETTINGS), model="none", reward_funcs=[len], args=args)


@pytest.mark.parametrize("given", ["args", "nothing"])
def test_an_engine_that_reports_no_logprobs_is_refused_before_anything_is_loaded(given, tmp_path):
    options = {}
    if given == "args":
        options["args"] = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match="DcGrpoTrainer: use_vllm=False: transformers reports no"):
        DcGrpoTrainer(dc_grpo=DcGrpo(**SETTINGS), model="none", reward_funcs=[len], **options)


def test_a_tolerance_in_place_of_its_object_is_refused():
    with pytest.raises(ValueError, match="dc_grpo is 0.0037: must be DcGrpo.tolerance=...."):
        DcGrpoTrainer(dc_grpo=0.0037, model="none", reward_funcs=[len])


def test_importance_weights_on_top_of_the_penalty_are_a_warning(caplog):
    config = GRPOConfig(use_cpu=True, bf16=False, use_vllm=True)
    trl_trainer._check({"args": config})
    assert "vllm_importance_sampling_correction=True: TRL's importance weights" in caplog.text
    caplog.clear()
    config.vllm_importance_sampling_correction = False
    trl_trainer._check({"args": config})
    assert caplog.text == ""


def test_the_example_learns_with_and_without_the_penalty_and_records_both(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    example = Path(__file__).resolve().parents[2] / "examples" / "trl_dc_grpo.py"
    runpy.run_path(str(example), run_name="__main__")
    *_, exact, grpo, dc_grpo, last = capsys.readouterr().out.splitlines()
    tolerance = float(last.removeprefix("c = ").partition(",")[0])
    # The probe's rule on the recording: 1.25 times the mean over all tokens.
    from dcmdp_jax.probe.columns.over_training import find_files, read_run
    from dcmdp_jax.probe.columns.recording_files import LeftOut

    files = find_files(["runs/trl/grpo_recordings"], LeftOut())
    found = read_run(files, LeftOut(), max_tokens=10**6)
    assert tolerance == pytest.approx(1.25 * found.pairs.discrepancy.mean(), abs=1e-4)
    assert found.over_training.has_rewards and found.over_training.steps[-1].reward > 0.9
    for line, name in ((exact, "exact"), (grpo, "grpo"), (dc_grpo, "dc_grpo")):
        said, before, after, discrepancy, multiplier = line.split()
        assert said == name
        # One of 18 tokens is the letter; the policy ends sure of it.
        assert float(before) < 0.3 and float(after) > 0.9
        # Sampled in one order and scored in another: float32 rounding alone.
        assert float(discrepancy) < 1e-4 if name == "exact" else float(discrepancy) > 1e-4
        assert (float(multiplier) == 0) == (name != "dc_grpo")
        assert len(list((tmp_path / "runs/trl" / f"{name}_recordings").iterdir())) == 60
    assert tolerance > 0

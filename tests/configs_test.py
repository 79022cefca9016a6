"""Every config file, plain and with its arguments, builds and means what its docstring says."""

import dataclasses
import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from configs import base, r1_distill_qwen_1p5b, remedies
from dcmdp_jax import dc_grpo_loss
from dcmdp_jax.algorithm.dual import dual_update
from dcmdp_jax.algorithm.losses import clip
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.config.settings import Config, to_dict
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.problems import load_problems
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.integrations.dc_grpo_torch import DcGrpo
from tests.support.each import check_each

_FILES = sorted(
    path.stem
    for path in (Path(__file__).resolve().parents[1] / "configs").glob("*.py")
    if path.stem not in ("__init__", "base")
)
_ARGUMENTS = ("", "grpo", "debug", "grpo,debug")


def _config(name, argument=""):
    return from_config_dict(importlib.import_module(f"configs.{name}").get_config(argument))


def _flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _changes(before, after):
    """Settings that differ: name -> (before, after)."""
    old = dict(_flat(to_dict(before)))
    new = dict(_flat(to_dict(after)))
    return {name: (old[name], new[name]) for name in old if old[name] != new[name]}


def test_the_files_are_all_found():
    assert {"demo", "qwen3_8b", "r1_distill_qwen_1p5b"} <= set(_FILES)


def test_each_argument_builds_has_its_method_and_a_run_directory_of_its_own():
    def check(name):
        made = {argument: _config(name, argument) for argument in _ARGUMENTS}
        for argument, config in made.items():
            assert config.algorithm.method == ("grpo" if "grpo" in argument else "dc_grpo"), (
                argument
            )
        assert len({config.run_dir for config in made.values()}) == len(_ARGUMENTS)

    check_each(_FILES, check)


def test_grpo_changes_the_method_and_the_run_directory_alone():
    def check(name, rest):
        changed = _changes(_config(name, rest), _config(name, f"grpo,{rest}"))
        assert sorted(changed) == ["algorithm.method", "run_dir"]
        assert changed["algorithm.method"] == ("dc_grpo", "grpo")

    check_each(itertools.product(_FILES, ("", "debug")), check)


def test_debug_is_small_needs_no_files_and_keeps_every_prompt():
    def check(name):
        config = _config(name, "debug")
        assert config.model.path == config.model.tokenizer == "" and config.task.train.startswith(
            "arithmetic:"
        )
        assert config.training.steps == 2 and config.mini_batches == 2
        assert config.training.prompts_per_step * config.rollout.group_size == 16
        assert config.max_total_tokens == 80 and config.warmup.steps <= 20
        # The built-in tokenizer has one token per character: with the prompt suffix for math
        # prompts have 80 tokens.
        limits = {
            "prompt_suffix": config.task.prompt_suffix,
            "max_prompt_tokens": config.task.max_prompt_tokens,
        }
        assert (
            encode_prompts(load_problems(config.task.train), build_tokenizer(), **limits).dropped
            == 0
        )

    check_each(_FILES, check)


def test_debug_leaves_the_method_as_the_file_has_it():
    def check(name):
        # Two steps are too few to measure c on.
        changed = [
            name
            for name in _changes(_config(name), _config(name, "debug"))
            if ".tolerance_" not in name
        ]
        assert not [
            setting for setting in changed if setting.startswith(("algorithm.", "optimizer."))
        ]
        assert "rollout.precision" not in changed

    check_each(_FILES, check)


def test_another_argument_is_refused():
    for argument in ("gpro", "grpo;debug", "grpo,small"):
        wrong = argument.split(",")[-1]
        with pytest.raises(
            ValueError,
            match=f"config argument '{wrong}': allowed are grpo, debug, joined by commas",
        ):
            base.get_config(argument)


def test_an_unknown_option_names_all_that_the_file_has():
    own = {
        "qwen3_8b": base.PAPER_OPTIONS,
        "qwen3_30b_a3b": base.PAPER_OPTIONS,
        "demo_vllm": ("float32", "fp8_kv", "fp8_weights", "int8"),
        "r1_distill_qwen_1p5b": base.PAPER_OPTIONS,
        "demo_moe": ("vllm", "replay"),
        "remedies": remedies.REMEDIES,
        "demo": (),
    }
    for name, options in own.items():
        with pytest.raises(ValueError, match="^config argument 'int9': allowed are ") as raised:
            _config(name, "debug,int9")
        named = (
            str(raised.value)
            .partition("allowed are ")[2]
            .removesuffix(", joined by commas")
            .split(", ")
        )
        assert named == ["grpo", "debug", *options], name
        for option in named:
            _config(name, option)


def test_the_papers_constants_of_the_8b_runs():
    """Section 6.1 of the paper, implementation details."""
    config = _config("qwen3_8b")
    algorithm = config.algorithm
    assert (algorithm.method, algorithm.measure, algorithm.sided, algorithm.level) == (
        "dc_grpo",
        "diff",
        "two",
        "token",
    )
    assert (algorithm.multiplier, algorithm.tolerance, algorithm.dual_learning_rate) == (
        0.1,
        0.0037,
        1.0,
    )
    assert (
        algorithm.trust_region == "clip"
        and inspect.signature(clip).parameters["high"].default == 0.24
    )
    assert algorithm.kl_coefficient == 0.0
    assert algorithm.aggregation == "seq_mean_token_mean"
    rollout = config.rollout
    assert (rollout.group_size, rollout.max_completion_tokens) == (8, 8192)
    assert rollout.temperature == 1.0
    assert (config.training.prompts_per_step, config.training.prompts_per_mini_batch) == (64, 16)
    assert config.mini_batches == 4 and config.completions_per_mini_batch == 128
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.beta1, optimizer.beta2) == (1e-6, 0.9, 0.95)
    assert (optimizer.weight_decay, optimizer.epsilon, optimizer.schedule) == (
        0.0,
        1e-15,
        "constant",
    )
    assert (config.model.compute_dtype, rollout.precision) == ("bfloat16", "bfloat16")
    assert config.task.train == "BytedTsinghua-SIA/DAPO-Math-17k"
    assert config.evaluation.temperature == 0.7 and config.warmup.steps == 0


def test_the_fp8_runs_of_the_8b_differ_by_the_engine_alone():
    """Table 2 of the paper: vLLM with FP8 weights and activations. lambda_0 and c are those of the
    BF16 runs.
    """
    changed = _changes(_config("qwen3_8b"), _config("qwen3_8b", "fp8"))
    assert {name: value for name, (_, value) in changed.items()} == {
        "run_dir": "runs/qwen3_8b_fp8",
        "rollout.precision": "fp8",
    }
    assert set(_changes(_config("qwen3_8b", "fp8"), _config("qwen3_8b", "fp8,grpo"))) == {
        "run_dir",
        "algorithm.method",
    }


def test_the_papers_runs_sample_with_vllm_on_all_gpus():
    """Section 6.1: vLLM; a replica for each GPU, or each four with the 30B's tensor parallelism of
    4.
    """

    def check(name):
        config = _config(name)
        assert (config.rollout.engine, config.rollout.vllm.replicas, config.rollout.max_rows) == (
            "vllm",
            0,
            512,
        )
        assert config.rollout.vllm.tensor_parallel_size == (4 if name == "qwen3_30b_a3b" else 1)
        assert {key for key in _changes(config, _config(name, "fp8"))} == {
            "run_dir",
            "rollout.precision",
        }
        local = _config(name, "local")
        assert local.rollout.engine == "local" and local.run_dir == f"{config.run_dir}_local"
        assert {key.split(".")[0] for key in _changes(config, local)} == {"run_dir", "rollout"}
        with pytest.raises(ValueError, match="config argument 'local,fp8'"):
            _config(name, "local,fp8")

    check_each(("qwen3_8b", "qwen3_30b_a3b", "r1_distill_qwen_1p5b"), check)


def test_the_30b_has_its_mesh():
    """The one that fits 32 H100 beside vLLM; the paper's does not: docs/plan.md."""
    mesh = _config("qwen3_30b_a3b").mesh
    assert (mesh.data, mesh.fsdp, mesh.tensor, mesh.expert) == (1, -1, 1, 1)


def test_the_30b_runs_differ_from_the_8b_runs_by_model_mesh_and_budget():
    """Section 6.1 of the paper: lambda_0 0.05 and c 0.0050 for Qwen3-30B-A3B."""
    changed = _changes(_config("qwen3_8b"), _config("qwen3_30b_a3b"))
    architecture = {name for name in changed if name.startswith("model.architecture.")}
    assert set(changed) - architecture == {
        "model.path",
        "run_dir",
        "rollout.vllm.tensor_parallel_size",
        "algorithm.multiplier",
        "algorithm.tolerance",
    }
    assert (changed["algorithm.multiplier"][1], changed["algorithm.tolerance"][1]) == (0.05, 0.0050)


def test_the_case_study_differs_from_the_8b_runs_by_its_model_alone():
    changed = _changes(_config("qwen3_8b"), _config("r1_distill_qwen_1p5b"))
    assert sorted(changed) == ["model.path", "run_dir"]


def test_the_vllm_demo_has_its_regimes():
    """Each in a run directory of its own, and all else as in the demo."""
    regimes = {
        "": ("bfloat16", "bfloat16", "auto"),
        "float32": ("float32", "float32", "auto"),
        "fp8_kv": ("bfloat16", "bfloat16", "fp8"),
        "fp8_weights": ("fp8_per_block", "bfloat16", "auto"),
        "int8": ("int8", "bfloat16", "auto"),
    }

    def check(option, expected):
        config = _config("demo_vllm", option)
        rollout = config.rollout
        assert rollout.engine == "vllm"
        assert (rollout.precision, rollout.compute_dtype, rollout.kv_cache_dtype) == expected
        assert config.run_dir == "runs/demo_vllm" + (f"_{option}" if option else "")
        changed = _changes(_config("demo"), config)
        assert not [
            name for name in changed if name.startswith(("model.", "task.", "training.", "warmup."))
        ]

    check_each(regimes.items(), check)


def test_the_demo_with_experts_is_the_demo_with_another_model():
    variants = {
        "": ("local", "fp8", "float32", False),
        "replay": ("local", "fp8", "float32", True),
        "vllm": ("vllm", "bfloat16", "bfloat16", False),
        "replay,vllm": ("vllm", "bfloat16", "bfloat16", True),
    }

    def check(option, expected):
        config = _config("demo_moe", option)
        plain = _config("demo")
        rollout = config.rollout
        assert (
            rollout.engine,
            rollout.precision,
            rollout.compute_dtype,
            rollout.router_replay,
        ) == expected
        assert config.run_dir == "runs/demo_moe" + "".join(
            f"_{name}" for name in ("vllm", "replay") if name in option
        )
        changed = {
            name
            for name in _changes(plain, config)
            if not name.startswith(("rollout.", "model.architecture."))
        }
        assert changed - {"run_dir", "algorithm.tolerance", "algorithm.dual_learning_rate"} == set()

    check_each(variants.items(), check)


def test_lambda_has_one_default_cap_and_begins_below_it():
    """Settings, the loss in one call, the dual update and the torch form; so the shipped ascent can
    rise.
    """
    algorithm = Config().algorithm
    caps = [inspect.signature(dual_update).parameters["multiplier_max"].default]
    caps += [
        inspect.signature(dc_grpo_loss).parameters["multiplier_max"].default,
        DcGrpo.multiplier_max,
    ]
    assert caps == [algorithm.multiplier_max] * 3 and not algorithm.begins_at_cap
    for name in ("demo", "demo_vllm", "smollm2", "qwen3_8b", "qwen3_30b_a3b"):
        assert not _config(name).algorithm.begins_at_cap, name
    assert dataclasses.replace(algorithm, multiplier_max=algorithm.multiplier).begins_at_cap
    assert not dataclasses.replace(
        algorithm, multiplier_max=0.1, dual_learning_rate=0.0
    ).begins_at_cap


def test_the_demo_trains_against_a_lower_precision_engine_with_room_for_lambda_to_move():
    config = _config("demo")
    assert config.rollout.precision in ("int8", "fp8") and config.model.compute_dtype == "float32"
    algorithm = config.algorithm
    assert 0 < algorithm.multiplier < algorithm.multiplier_max
    assert config.evaluation.every_steps and "split=heldout" in config.evaluation.task
    assert config.training.steps % config.evaluation.every_steps == 0


def test_the_published_models_sums_are_chats_whose_last_turn_is_begun_and_held_out_apart():
    config = _config("smollm2")
    train = load_problems(config.task.train)
    held_out = load_problems(config.evaluation.task)
    assert (len(train), len(held_out)) == (640, 64)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in held_out}
    for problem in (*train, *held_out):
        first, second = map(int, problem.prompt.split(" + "))
        assert 1 <= first < 30 and 1 <= second < 30 and problem.answer == str(first + second)
        assert [message["content"] for message in problem.messages[1:]] == [
            problem.prompt,
            f"{problem.prompt} =",
        ]
        assert problem.messages[-1]["role"] == "assistant"
    vllm = _changes(config, _config("smollm2", "vllm"))
    assert vllm["rollout.engine"][1] == "vllm" and vllm["rollout.precision"][1] == "bfloat16"
    own = _config("smollm2", "sentence")
    questions = load_problems(own.task.train, answers="unused")
    assert not {p.prompt for p in questions} & {
        p.prompt for p in load_problems(own.evaluation.task, answers="unused")
    }


def test_debug_of_the_distilled_qwen2_5_builds_its_family():
    assert r1_distill_qwen_1p5b.get_config("local,debug").model.architecture.model_type == "qwen2"

"""Each pair of features runs for two steps, or is refused before anything starts.

A run has many features at once.
"""

import functools
import itertools
import json
import math

import jax
import pytest

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.commands.train import train
from dcmdp_jax.data.arithmetic import build_tokenizer
from tests.environments import planted_environments, planted_tools
from tests.support.each import check_each
from tests.training.teacher_test import _save_teacher

_BASE = {
    "model.architecture.hidden_size": 16,
    "model.architecture.intermediate_size": 16,
    "model.architecture.num_layers": 2,
    "model.architecture.num_heads": 2,
    "model.architecture.num_kv_heads": 1,
    "model.architecture.head_dim": 8,
    "model.scan_unroll": 1,
    "model.logprob_chunk": 64,
    "task.max_turns": 2,
    "task.max_turn_tokens": 8,
    "task.max_prompt_tokens": 128,
    "task.verifier_workers": 1,
    "rollout.precision": "float32",
    "rollout.max_completion_tokens": 40,
    "rollout.group_size": 2,
    "training.prompts_per_step": 8,
    "training.prompts_per_mini_batch": 8,
    "training.steps": 2,
    "warmup.steps": 0,
    "evaluation.every_steps": 0,
    "mesh.data": 1,
    "mesh.fsdp": 8,
}
_VOCABULARY = len(build_tokenizer())
_MOE = {
    "model.architecture.model_type": "qwen3_moe",
    "model.architecture.num_experts": 4,
    "model.architecture.num_experts_per_tok": 2,
    "model.architecture.moe_intermediate_size": 16,
}
_LISTS = {"rollout.top_logprobs": _VOCABULARY}
_FEATURES = {
    "environment": {
        "task.environment": f"{planted_environments.__file__}:NeverEnds",
        "rewards.functions": "environment",
    },
    "tools": {"task.environment": f"tools:{planted_tools.__file__}:add"},
    "top_logprobs": _LISTS,
    "top_p": _LISTS | {"rollout.top_p": 0.9},
    "top_k": _LISTS | {"rollout.top_k": 4},
    "score_centering": _LISTS | {"algorithm.corrections": "score_centering"},
    "state_tv": _LISTS | {"algorithm.method": "state_tv"},
    "teacher": {"rewards.functions": "teacher:TEACHER,math"},
    "lora": {"model.lora_rank": 2},
    "lag": {"rollout.lag": 1},
    "moe": _MOE | {"algorithm.router_aux_loss": 0.001},
    "router_replay": _MOE | {"rollout.router_replay": True},
    "hybrid": {
        "model.architecture.model_type": "qwen3_5_text",
        "model.architecture.num_layers": 4,
    },
    "sliding": {"model.architecture.model_type": "gemma3_text"},
    "mini_batches": {"training.prompts_per_mini_batch": 4},
    "refills": {"algorithm.drop_equal_groups": True, "algorithm.refill_rounds": 1},
    "corrections": {"algorithm.corrections": "tis,sequence_rejection,veto"},
    "packing": {"training.row_lengths": (168, 336), "training.segments_per_row": 4},
    "forward_precision": {"rollout.precision": "int8", "model.forward_precision": "int8"},
    "fp8_cache": {"rollout.precision": "fp8", "rollout.kv_cache_dtype": "fp8"},
    "nvfp4": {"rollout.precision": "nvfp4"},
    "exact": {"rollout.precision": "exact"},
    "bfloat16": {
        "model.compute_dtype": "bfloat16",
        "rollout.compute_dtype": "bfloat16",
        "rollout.precision": "bfloat16",
    },
    "forward_cache": {
        "rollout.precision": "fp8",
        "rollout.kv_cache_dtype": "fp8",
        "model.forward_precision": "fp8",
        "model.forward_cache": "fp8",
    },
    "float16": {"model.compute_dtype": "float16"},
    "mixture": {"task.train": "arithmetic:difficulty=1,count=8@3,arithmetic:difficulty=2,count=8"},
    "prefix_correction": {"algorithm.corrections": "minpro"},
    "log_ratio_squared": {"algorithm.loss": "log_ratio_squared"},
    "vespo": {"algorithm.trust_region": "vespo", "algorithm.ratio_denominator": "rollout"},
    "kl": {"algorithm.kl_coefficient": 0.1},
    "gspo": {"algorithm.ratio_level": "sequence"},
    "sequence_level": {"algorithm.level": "sequence"},
    "reward_level": {"algorithm.level": "reward"},
    "bypass": {"algorithm.ratio_denominator": "bypass"},
    "rollout_ratio": {
        "algorithm.ratio_denominator": "rollout",
        "algorithm.trust_region": "dppo_tv",
    },
    "proximal": {"algorithm.ratio_denominator": "proximal", "rollout.lag": 1},
    "budget": {"algorithm.budget": "p99", "algorithm.tolerance_steps": 1},
    "overlong": {"algorithm.overlong_buffer": 8, "algorithm.mask_truncated": True},
    "fixed_length": {"algorithm.aggregation": "fixed_length"},
    "evaluation": {
        "evaluation.every_steps": 1,
        "evaluation.task": "arithmetic:difficulty=1,count=2,split=heldout",
        "evaluation.samples": (2,),
    },
    "warmup": {
        "warmup.steps": 1,
        "warmup.task": "arithmetic:difficulty=1,count=32,seed=1",
        "warmup.batch_size": 8,
    },
    "remat": {"model.remat": "full"},
    "drop_broken": {"rollout.on_non_finite": "drop"},
    "temperature": {"rollout.temperature": 0.7},
    "recorded_tokens": {"observe.rollouts_every_steps": 1, "observe.samples_every_steps": 1},
    "supervised": {"algorithm.loss": "likelihood"},
}
# Settings that name several things.
_JOINED = ("algorithm.corrections", "rewards.functions")
# What concerns columns of sampled tokens.
_COLUMNS = ("environment", "tools", "top_p", "score_centering", "lag", "mini_batches", "evaluation")
# What a supervised run does not pass over.
_SUPERVISED = (
    "supervised",
    "lora",
    "moe",
    "hybrid",
    "sliding",
    "mini_batches",
    "packing",
    "bfloat16",
)
_SUPERVISED += ("evaluation", "remat", "recorded_tokens")
_SAMPLED = tuple(feature for feature in _FEATURES if feature != "supervised")


def _settings(features):
    """The settings of features; None if two of them set one setting to different values."""
    settings = {}
    for feature in features:
        for name, value in _FEATURES[feature].items():
            if name in _JOINED and name in settings:
                value = f"{settings[name]},{value}"
            elif settings.get(name, value) != value:
                return None
            settings[name] = value
    return settings


@functools.cache
def _refusal(features):
    """The line that refuses features together; empty if they are accepted.

    None if they exclude each other.
    """
    settings = _settings(features)
    if settings is None:
        return None
    try:
        load_config("demo:debug", _BASE | settings)
    except ValueError as error:
        return str(error)
    return ""


def _runs(features):
    """Sets of features that are accepted together and cover each accepted pair."""
    left = {pair for pair in itertools.combinations(features, 2) if _refusal(pair) == ""}
    runs = []
    while left:
        run = min(left, key=lambda pair: [features.index(feature) for feature in pair])
        for feature in features:
            wider = tuple(sorted({*run, feature}, key=features.index))
            added = left & set(itertools.combinations(wider, 2)) - set(
                itertools.combinations(run, 2)
            )
            if added and _refusal(wider) == "":
                run = wider
        left -= set(itertools.combinations(run, 2))
        runs.append(run)
    return runs


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    directory = tmp_path_factory.mktemp("teacher")
    _save_teacher(directory, num_hidden_layers=1, max_position_embeddings=512)
    return str(directory)


def _train(features, run_dir, teacher):
    settings = _BASE | _settings(features) | {"run_dir": str(run_dir)}
    functions = settings.get("rewards.functions", "math").replace("TEACHER", teacher)
    train(load_config("demo:debug", settings | {"rewards.functions": functions}))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "policy/loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    numbers = {
        name: value
        for record in steps
        for name, value in record.items()
        if not isinstance(value, dict)
    }
    assert all(math.isfinite(float(value)) for value in numbers.values()), numbers


def test_a_pair_that_is_refused_is_refused_in_one_line_that_names_a_setting():
    refusals = {
        pair: _refusal(pair) for pair in itertools.combinations(_SAMPLED, 2) if _refusal(pair)
    }
    assert all(line.startswith("config.") and "\n" not in line for line in refusals.values()), (
        refusals
    )
    assert refusals.keys() >= {("environment", "router_replay"), ("lora", "forward_precision")}
    assert ("environment", "top_logprobs") not in refusals


@pytest.mark.parametrize("features", [*_runs(_COLUMNS), ("teacher", "float16")], ids="-".join)
def test_each_pair_of_what_concerns_sampled_tokens_trains(features, tmp_path, teacher):
    _train(features, tmp_path / "run", teacher)


@pytest.mark.long
def test_each_pair_of_features_trains(tmp_path, teacher):
    def check(*features):
        _train(features, tmp_path / "-".join(features)[:200], teacher)
        jax.clear_caches()

    check_each([*_runs(_SAMPLED), *_runs(_SUPERVISED)], check)

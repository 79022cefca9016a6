"""bin.evaluate with stock vLLM as a sidecar: the same model, the same answers as by the embedded
engine.
"""

import json

import pytest

from dcmdp_jax.commands import evaluate
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.models.hf_weights import save_params
from tests.support.coin_model import SAMPLES, TASK, TEMPERATURE, TOKENS
from tests.support.vllm_tools import random_params, small_model


@pytest.fixture(scope="module")
def hf_dir(vllm_is_installed, tmp_path_factory):
    base = tmp_path_factory.mktemp("hf")
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(base / "tokenizer")
    config = small_model(vocab_size=len(tokenizer), tied=False)
    params = random_params(config, 0)
    # A loud end token: completions end, each after a length of its own.
    params["output"] = params["output"].at[:, tokenizer.eos_token_id].multiply(2.5)
    save_params(params, config, base / "m", dtype="float32", tokenizer_dir=base / "tokenizer")
    return base / "m"


def _run(hf_dir, out, *options):
    task = "arithmetic:difficulty=1,count=12,split=heldout"
    precision = (
        "--config.rollout.precision",
        "float32",
        "--config.rollout.compute_dtype",
        "float32",
        "--config.task.prompt_suffix",
        "",
    )
    evaluate.main(
        [
            "evaluate",
            str(hf_dir),
            TASK,
            task,
            SAMPLES,
            "1",
            TOKENS,
            "40",
            *precision,
            "--out",
            str(out),
            *options,
        ]
    )
    [result] = json.loads(out.read_text())["tasks"].values()
    return result


@pytest.mark.long
def test_greedy_answers_are_those_of_the_embedded_engine(hf_dir, tmp_path):
    """Scores, lengths and truncations."""
    greedy = (TEMPERATURE, "0")
    local = _run(hf_dir, tmp_path / "local.json", "--config.rollout.engine", "local", *greedy)
    vllm = _run(hf_dir, tmp_path / "vllm.json", "--config.rollout.engine", "vllm", *greedy)
    assert vllm == local
    assert 1 < local["length_mean"] < 40
    assert local["truncated_fraction"] < 1
    record = json.loads((tmp_path / "vllm.json").read_text())
    assert record["settings"]["rollout.engine"] == "vllm"
    assert sorted(path.name for path in (tmp_path / "vllm.vllm").iterdir()) == [
        "config.json",
        "sidecar.log",
    ]

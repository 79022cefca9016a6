"""The programs of a small run as the compilers of TPUs and GPUs have them, where they are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SMALL = {
    "model.architecture.num_layers": 2, "model.architecture.hidden_size": 256, "model.architecture.head_dim": 128,
    "model.architecture.num_heads": 2, "model.architecture.num_kv_heads": 2, "model.logprob_chunk": 128,
    "task.max_prompt_tokens": 128, "rollout.max_completion_tokens": 512, "training.micro_batch_tokens": 640,
    "training.prompts_per_step": 8, "training.prompts_per_mini_batch": 4,
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("topology", "compiler"), [("v5e:2x4", "libtpu"), ("h100:8", "jax_cuda12_plugin")])
def test_no_program_has_logits_attention_matrices_or_the_whole_tree(topology, compiler, tmp_path):
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed (extra `plan`)")
    file = tmp_path / "plan.json"
    settings = [f"--config.{name}={value}" for name, value in _SMALL.items()] + ["--config.training.row_lengths=(640,)"]
    # A process of its own: XLA reads its flags once, and here they are those of fake CPU devices.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "bin.plan", "--config=configs/qwen3_8b.py:debug", f"--topology={topology}",
         f"--json={file}", *settings],
        cwd=_ROOT, capture_output=True, text=True, timeout=1800, check=False,
        env={**environment, "PYTHONPATH": str(_ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    record = json.loads(file.read_text())
    assert set(record["programs"]) == {"step", "prefill", "decode", "score"}
    checks = {check["name"]: check for check in record["checks"]}
    for what in ("[tokens, vocabulary] array", "[length, length] attention matrix",
                 "gather of a parameter of all layers"):  # fmt: skip
        assert checks[f"no {what}"] == {"name": f"no {what}", "found": "none", "holds": True}
    assert record["programs"]["step"]["attention_kernel_flops"] > 0

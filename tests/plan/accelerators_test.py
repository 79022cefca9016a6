"""The programs of a small run as the compilers of TPUs and GPUs have them, where they are
installed.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.support.processes import finished

_ROOT = Path(__file__).resolve().parents[2]
# With fewer rows, the partial sums of a product that a GPU splits, four of a chunk's logits, count
# as all logits.
_SMALL = {
    **{f"model.architecture.{name}": 2 for name in ("num_layers", "num_heads", "num_kv_heads")},
    "model.architecture.hidden_size": 256,
    "model.architecture.head_dim": 128,
    "model.logprob_chunk": 128,
    "task.max_prompt_tokens": 128,
    "rollout.max_completion_tokens": 512,
    "training.micro_batch_tokens": 640,
    "training.prompts_per_step": 16,
    "training.prompts_per_mini_batch": 4,
    "rollout.max_rows": 64,
    "training.row_lengths": "(640,)",
}


# The attention kernel of GPUs gets the rows and heads of one device, however the mesh splits them.
# Two key-value heads are on four devices along tensor.
_MESHES = {
    "data 8": {"mesh.data": 8, "mesh.fsdp": 1},
    "data 2, fsdp 4": {"mesh.data": 2, "mesh.fsdp": 4},
    "fsdp 2, tensor 4": {"mesh.fsdp": 2, "mesh.tensor": 4, "model.architecture.num_heads": 4},
}


def _plan(tmp_path, topology, compiler, settings, *flags):
    """The record of a small run's plan."""
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"{compiler} is not installed (extra `plan`)")
    file = tmp_path / "plan.json"
    changes = [f"--config.{name}={value}" for name, value in (_SMALL | settings).items()]
    # A process of its own: XLA reads its flags once, and here they are those of fake CPU devices.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = (
        "-m",
        "benchmarks.compiled",
        "--config=configs/qwen3_8b.py:local,debug",
        f"--topology={topology}",
    )
    environment = {**environment, "PYTHONPATH": str(_ROOT)}
    finished(*command, f"--json={file}", *flags, *changes, env=environment)
    return json.loads(file.read_text())


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "compiler"), [("v5e:2x4", "libtpu"), ("h100:8", "jax_cuda12_plugin")]
)
def test_no_program_has_logits_attention_matrices_or_the_whole_tree(topology, compiler, tmp_path):
    record = _plan(tmp_path, topology, compiler, {})
    assert set(record["programs"]) == {"step", "prefill", "decode", "score"}
    checks = {check["name"]: check for check in record["checks"]}
    for what in (
        "[tokens, vocabulary] array",
        "[length, length] attention matrix",
        "gather of a parameter of all layers",
    ):
        assert checks[f"no {what}"] == {"name": f"no {what}", "found": "none", "holds": True}
    assert record["programs"]["step"]["attention_kernel_flops"] > 0


@pytest.mark.long
@pytest.mark.parametrize("mesh", _MESHES.values(), ids=_MESHES)
def test_a_step_on_gpus_has_cudnn_attention_on_every_mesh(mesh, tmp_path):
    # One mini-batch: a second one only adds time to the compilation.
    record = _plan(
        tmp_path,
        "h100:8",
        "jax_cuda12_plugin",
        mesh | {"training.prompts_per_step": 4},
        "--programs=step",
    )
    checks = {check["name"]: check["found"] for check in record["checks"]}
    assert checks["no [length, length] attention matrix"] == "none"
    assert record["programs"]["step"]["attention_kernel_flops"] > 0


@pytest.mark.long
def test_a_gpu_packs_rows_by_default(tmp_path):
    """The peak that one sequence a row has, within 2%; the workspace that this compiler can't see
    is beside it.
    """
    settings = {
        "training.row_lengths": "()",
        "training.prompts_per_step": 4,
        "model.remat": "none",
        "mesh.fsdp": 1,
    }
    packed, single = (
        _plan(
            tmp_path,
            "h100:1",
            "jax_cuda12_plugin",
            settings | {"training.segments_per_row": most},
            "--programs=step",
        )
        for most in (0, 1)
    )
    assert packed["row_lengths"] == [640] and single["row_lengths"] == [128, 256, 384, 640]
    peaks = [plan["programs"]["step"]["peak_bytes"] for plan in (packed, single)]
    assert 0.98 < peaks[0] / peaks[1] < 1.02
    # 8 bytes x 640 tokens x 2 heads x 128 x 16 sequences.
    assert packed["phases"]["step"]["beside_bytes"] == {"cuDNN's workspace": 20_971_520}
    checks = {check["name"]: check["found"] for check in packed["checks"]}
    assert checks["no [length, length] attention matrix"] == "none"


@pytest.mark.long
@pytest.mark.parametrize("mesh", _MESHES.values(), ids=_MESHES)
def test_packed_rows_on_gpus_have_no_mask(mesh, tmp_path):
    packed = {
        "training.segments_per_row": 8,
        "training.row_lengths": "(1280,)",
        "training.micro_batch_tokens": 1280,
        "training.prompts_per_step": 4,
    }
    record = _plan(tmp_path, "h100:8", "jax_cuda12_plugin", mesh | packed, "--programs=step")
    checks = {check["name"]: check["found"] for check in record["checks"]}
    assert checks["no [length, length] attention matrix"] == "none"
    assert record["programs"]["step"]["attention_kernel_flops"] > 0

"""`benchmarks.accelerator` at toy size on a CPU."""

import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator
from benchmarks.accelerator import PARTS, Part
from benchmarks.accelerator_parts import attention, runs, step, torch_peer
from benchmarks.accelerator_parts.sizes import SIZES, completions, run_settings
from benchmarks.accelerator_parts.tables import summary, table
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.ops import REFERENCE
from dcmdp_jax.models.params import num_params
from dcmdp_jax.plan.published import model_of
from tests.support.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
_TOY = SIZES["toy"]


def _measured(name):
    """Measure a part in this process. A table is made of everything that it reports on the way."""
    snapshots = []
    PARTS[name].measure(_TOY, lambda found: snapshots.append(json.loads(json.dumps(found))))
    assert all(table(found) for found in snapshots)
    return snapshots[-1]


def _errors(attends, inputs, exact, ids):
    results = {
        name: jax.jit(functools.partial(attention.with_gradients, f))(inputs)
        for name, f in attends.items()
    }
    return {
        name: attention.largest_errors(result, exact, ids > 0) for name, result in results.items()
    }


def _episode(prompt, sampled):
    ids = np.zeros(prompt, np.int32), np.zeros(sampled, np.int32), np.zeros(sampled, np.float32)
    return single_turn(*ids, policy_version=0, group=0, member=0, finish_reason="stop")


def test_the_published_shape():
    """28 x (3 x 2048^2 + 3 x 2048 x 6144 + 2 x 2048 + 2 x 128) + 151936 x 2048 + 2048."""
    model = model_of(from_config_dict(run_settings(SIZES["1.7B"])))
    assert num_params(model) == 1_720_574_976


def test_needed_operations_of_a_step_by_hand():
    # Matrices of a layer: q and o 16 each, k and v 8 each, MLP 3 x 32 = 144; two layers 288; output
    # 4 x 10.
    model = ModelConfig("qwen3", 10, 4, 8, 2, 2, 1, 2)
    # Forward: 2 x 328 a token, and 2 layers x 2 products x 2 x 4 x n / 2 for attention, n = 5 and
    # 3.
    forward = 656 * 8 + 16 * (25 + 9)
    # No logits for the 2 + 1 prompt tokens. With rows of 5 for both sequences attention alone would
    # add 3 x 16 x 6.
    assert (
        step.needed_flops(model, [_episode(2, 3), _episode(1, 2)])
        == 3 * (forward - 2 * 40 * 3)
        == 16656
    )


def test_the_step_in_the_layout_of_a_run():
    found = _measured("step")
    model = model_of(from_config_dict(run_settings(_TOY)))
    lengths = [len(episode.token_ids) for episode in completions(_TOY, model)]
    assert found["tokens"] == sum(lengths) and found["sequences"] == 16
    # In bfloat16 a CPU's attention is the plain one: a sequence a row, in rows of several lengths.
    assert found["most_sequences_per_row"] == 1 and len(found["row_lengths"]) > 1
    assert sum(lengths) < found["computed_tokens"] < 16 * 128
    assert found["tokens_per_second"] == [sum(lengths) / seconds for seconds in found["seconds"]]
    assert len(found["seconds"]) == _TOY.repeats
    # Parameters and two moments in float32 are arguments.
    assert (
        found["predicted_peak_bytes"] >= found["predicted_argument_bytes"] >= 12 * num_params(model)
    )
    assert found["needed_flops"] == step.needed_flops(model, completions(_TOY, model))
    assert found["skipped_updates"] == 0 and found["unknown_loops"] == []
    # Padding and the upper half of attention are computed too; far less would be a loop that is
    # counted once.
    assert 1 < found["compiled_over_needed"] < 4
    assert found["nearer"] in ("compute", "memory") and found["share_of_bound"] > 0


@pytest.mark.parametrize("packed", [True, False])
def test_attention_errors_are_within_the_bound_by_hand(packed):
    ids = attention.segments(2, 128, packed=packed)
    # 120 real tokens, in parts of 1 to 7 28ths.
    sizes = np.bincount(ids[0])[1:].tolist()
    assert sizes == ([4, 8, 13, 17, 22, 26, 30] if packed else [120])
    inputs = attention.random_inputs(4, 2, 16, ids)
    attends = attention.contenders("cpu", jnp.asarray(ids), packed=packed)
    exact = attention.exact_results(attends[attention.PLAIN], inputs)
    # bfloat16 rounds to within 2^-8: weights that sum to 1 once, the result once. The scale of 1 /
    # 4 is exact.
    bound = (
        2
        * 2.0**-8
        * float(jnp.abs(inputs.value.astype(jnp.float32)).max())
        / np.abs(exact[0][ids > 0]).max()
    )
    assert set(attends) == {attention.PLAIN, "xla"}
    errors = _errors(attends, inputs, exact, ids)
    assert all(0 < of_kernel["output"] <= bound for of_kernel in errors.values())
    assert attention.too_large(errors) == []


def test_a_kernel_that_ignores_segments_is_found():
    ids = attention.segments(1, 128, packed=True)
    inputs = attention.random_inputs(4, 2, 16, ids)
    attends = attention.contenders("cpu", jnp.asarray(ids), packed=True)
    exact = attention.exact_results(attends[attention.PLAIN], inputs)
    causal = jnp.tril(jnp.ones((1, 128, 128), bool))
    attends["wrong"] = lambda query, key, value: REFERENCE.attention(query, key, value, causal)
    errors = _errors(attends, inputs, exact, ids)
    assert [line.split(":")[:2] for line in attention.too_large(errors)] == [
        [
            "wrong",
            f" {name} is off by {error:.3g} of its largest value, the plain version by "
            f"{errors['plain'][name]:.3g}",
        ]
        for name, error in errors["wrong"].items()
    ]
    # NaN is not below any bound.
    errors["wrong"] = dict.fromkeys(attention.RESULTS, float("nan"))
    assert len(attention.too_large(errors)) == 4


def test_the_products_of_attention_by_hand():
    # Segments of 2 and 3 tokens see 1 + 2 and 1 + 2 + 3 keys; padding counts nothing. 2 x 9 x 4
    # heads x 16.
    assert attention.product_flops(np.array([[1, 1, 2, 2, 2, 0]]), 4, 16) == 1152


def test_attention_is_measured():
    found = _measured("attention_packed")
    assert set(found["errors"]) == set(found["passes"]["forward"]) == {"plain", "xla"}
    forward, both = (found["passes"][name]["plain"] for name in attention.PASSES)
    assert both["needed_flops"] == 3 * forward["needed_flops"]
    # The plain version computes both products over the whole square: 2 x 2 x 2 rows x 128^2 x 4
    # heads x 16.
    assert forward["compiled_flops"] == 8 * 128**2 * 64


def test_every_token_of_the_engine_is_counted():
    found = _measured("engine_int8")
    # 2 prompts x 2 completions x 8 tokens.
    assert found["tokens"] == 32 and found["tokens_per_second"] == [
        32 / seconds for seconds in found["seconds"]
    ]
    assert found["cache_slots"] == 16 + 8


def test_the_dense_layer_computes_what_is_needed():
    found = _measured("experts")
    dense = found["passes"]["forward"]["dense"]
    # Three products of [64, 32] and [32, 2 x 16].
    assert dense["needed_flops"] == 3 * 2 * 64 * 32 * 32 == dense["compiled_flops"]
    eighth = {"products, an eighth", "ragged_dot, an eighth"}
    assert set(found["passes"]["forward and backward"]) == {"dense", "experts", "products"} | eighth
    # Three products of [8 x 2, 32] and [32, 16], for each of four experts where all rows meet all
    # matrices.
    plain = found["passes"]["forward"]["ragged_dot, an eighth"]
    assert (plain["needed_flops"], plain["compiled_flops"]) == (
        3 * 2 * 16 * 32 * 16,
        4 * 3 * 2 * 16 * 32 * 16,
    )


def test_a_table_has_every_value_with_its_spread():
    found = {
        "kind": "step",
        "size": "toy",
        "tokens": 63952,
        "seconds": [2.0, 1.0, 4.0],
        "bounds": {"memory": 0.12345},
    }
    assert table(found).splitlines()[2:] == [
        "| kind | step |",
        "| size | toy |",
        "| tokens | 63,952 |",
        "| seconds | 2 (1 - 4) |",
        "| bounds, memory | 0.1235 |",
    ]
    assert table({"size": "toy", "error": "out of memory"}) == ""


def test_a_part_that_fails_hides_no_other(tmp_path, monkeypatch, capsys):
    def fails(size, tell):
        tell({"kind": "device", "half": 1})
        raise RuntimeError("planted")

    def works(size, tell):
        tell({"tokens_per_second": [size.new_tokens]})

    monkeypatch.setattr(
        accelerator, "PARTS", {"fails": Part(fails, 9, 0), "works": Part(works, 9, 0)}
    )
    codes = []
    written = []

    def run(name, seconds):
        record = tmp_path / name
        codes.append(accelerator.measure_here(name, "toy", record, {}))
        return json.loads(record.read_text())

    code = accelerator.run_parts(
        ["fails", "works"], run, lambda record: written.append(json.dumps(record)), 60
    )
    assert (code, codes) == (1, [1, 0])
    assert "RuntimeError: planted" in capsys.readouterr().err
    # The record was written when only the first part had run.
    assert list(json.loads(written[0])["parts"]) == ["fails"]
    parts = json.loads(written[-1])["parts"]
    assert (parts["fails"]["error"], parts["fails"]["half"]) == ("RuntimeError: planted", 1)
    assert parts["works"]["error"] is None and parts["works"]["tokens_per_second"] == [8]
    assert "works: 8 tokens/s" in summary(json.loads(written[-1]))


def test_a_process_that_dies_or_hangs_is_an_error(tmp_path):
    record = tmp_path / "record"
    write = f"import pathlib; pathlib.Path({str(record)!r}).write_text('{{\"tokens\": 3}}');"
    python = [sys.executable, "-c"]
    assert accelerator.run_process([*python, "pass"], tmp_path / "none", 600) == {"error": None}
    assert accelerator.run_process([*python, f"{write} import os; os._exit(9)"], record, 600) == {
        "tokens": 3,
        "error": "ended with exit code 9",
    }
    assert accelerator.run_process([*python, "import os; os.abort()"], tmp_path / "none", 600) == {
        "error": "ended with exit code -6"
    }
    assert accelerator.run_process([*python, "import time; time.sleep(600)"], record, 0.5) == {
        "tokens": 3,
        "error": "killed after 0 s",
    }


def test_the_command_writes_one_json_and_names_what_it_left_out(tmp_path, monkeypatch, capsys):
    file = tmp_path / "accelerator.json"
    parts = {
        "device": Part(PARTS["device"].measure, 600, 0),
        "engine_int8": Part(PARTS["engine_int8"].measure, 1, 1e6),
    }
    monkeypatch.setattr(accelerator, "PARTS", parts)
    assert (
        accelerator.main(["--parts", "device,engine_int8", "--budget-s", "900", f"--json={file}"])
        == 0
    )
    record = json.loads(file.read_text())
    assert (record["parts"]["device"]["size"], record["parts"]["device"]["error"]) == ("toy", None)
    assert record["left_out"] == ["engine_int8"]
    assert "engine_int8: left out" in capsys.readouterr().out


_NOT_ON_THE_MACHINE = """
    antlr4 datasets httpx hypothesis jinja2 latex2sympy2_extended math_verify matplotlib ml_collections
    mpmath pyarrow pytest sympy tensorboardX torch wandb
""".split()


@pytest.mark.long
def test_it_needs_jax_flax_optax_orbax_and_transformers_alone(tmp_path):
    """On a lent machine: the checkout on PYTHONPATH, and nothing installed for it."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nfor name in {_NOT_ON_THE_MACHINE}:\n    sys.modules[name] = None\n"
    )
    parts = ["step", "engine_fp8"]
    command = [
        sys.executable,
        "-m",
        "benchmarks.accelerator",
        "--parts",
        ",".join(parts),
        "--json",
        "found.json",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
        "XLA_FLAGS": "",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert list(found) == parts and all(part["error"] is None for part in found.values())


def test_toy_size_is_for_a_cpu_alone(monkeypatch):
    assert accelerator.size_name("auto") == "toy"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert accelerator.size_name("auto") == "1.7B"


def test_torchs_micro_batches_hold_every_sequence_within_the_limit():
    lengths = np.array([3, 9, 4, 1, 9])
    # Of 9 and 9 together 18 tokens are too many; 4, 3 and 1 take 12 with their padding.
    assert [batch.tolist() for batch in torch_peer.sorted_micro_batches(lengths, 12)] == [
        [1],
        [4],
        [2, 0, 3],
    ]


def test_torch_does_the_work_of_the_step():
    pytest.importorskip("torch")
    found = _measured("torch_step")
    model = model_of(from_config_dict(run_settings(_TOY)))
    assert found["tokens"] == sum(len(episode.token_ids) for episode in completions(_TOY, model))
    assert set(found["contenders"]) == {"no recomputation", "gradient checkpointing"}
    assert all(min(one["seconds"]) > 0 for one in found["contenders"].values())


def test_the_sockets_of_a_child_are_found_and_no_others():
    code = (
        "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], "
        "flush=True); input()"
    )
    with (
        socket.create_server(("127.0.0.1", 0)),
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        port = child.stdout.readline().strip()
        [found] = runs.listening(child.pid)
        child.communicate("\n")
    # 127.0.0.1 in the kernel's order of bytes.
    assert found.startswith(f"0100007F:{port}, python")


@pytest.mark.long
def test_every_part_runs_at_toy_size(tmp_path):
    """As on a GPU: in its order, each part in a process of its own, all into one cache; in under 3
    minutes.
    """
    command = [sys.executable, "-m", "benchmarks.accelerator", "--json", "found.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["left_out"] == ["vllm_bfloat16", "vllm_fp8", "smollm2"]
    assert list(found["parts"]) == [name for name in PARTS if name not in found["left_out"]]
    demo = found["parts"]["demo"]
    assert (
        demo["steps"] == 5
        and demo["broken_rule"] == []
        and 0 < demo["first_step_seconds"] < demo["seconds"]
    )

"""What `benchmarks.compiled` counts of a run's programs on eight CPU devices, against counts by
hand.
"""

import collections
import dataclasses
import json

import jax
import pytest

from benchmarks import compiled
from benchmarks.compiled import account_record, compile_and_count, describe_account
from benchmarks.compiled_parts.goals import all_logits, check_goals, model_shapes
from benchmarks.compiled_parts.hlo import Array
from benchmarks.compiled_parts.least import decode_bytes, least_of
from dcmdp_jax.models.params import num_params
from tests.support.runs import ROOT
from tests.support.small_plan import EIGHT_CHIPS, small_config


@pytest.fixture(scope="module")
def plan():
    return compile_and_count(small_config(), EIGHT_CHIPS, only=("step", "decode"))


def test_products_of_the_step(plan):
    """By hand. A device has one row of 80 tokens of a micro-batch; two micro-batches, two
    mini-batches.
    """
    model = plan.run.model
    tokens = 80
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    down = 2 * tokens * model.hidden_size * model.intermediate_size
    # The xla kernel computes the half of attention that causality hides.
    layer = (
        2 * tokens * model.hidden_size * (2 * queries + 2 * keys)
        + 3 * down
        + 4 * queries * tokens**2
    )
    # 79 tokens are predicted, all in one block: a piece of the vocabulary is an eighth of it.
    head = 2 * 79 * model.hidden_size * model.vocab_size
    # remat=full: forward, again for the backward pass but for the last product, backward. So does
    # the head.
    gradient = model.num_layers * (4 * layer - down) + 4 * head
    # Four micro-batches, and p^Train of the two of the second mini-batch.
    by_hand = 4 * gradient + 2 * (model.num_layers * layer + head)
    assert plan.programs["step"].account.unknown_loops == ()
    flops = plan.programs["step"].account.flops
    assert flops.products == by_hand
    # XLA:CPU drops the names of attention's products, which are computed again too.
    attention = 4 * queries * tokens**2
    matrices = layer - attention
    assert flops.parts == {
        "layers forward": 6 * model.num_layers * matrices,
        "layers again": 4 * model.num_layers * (matrices - down),
        "layers backward": 4 * model.num_layers * 2 * matrices,
        "head forward": 6 * head,
        "head backward": 4 * 3 * head,
        "unnamed": (6 + 4 + 8) * model.num_layers * attention,
    }
    # The model needs three forward passes for a gradient, and half of attention.
    needed = (3 * 4 + 2) * (model.num_layers * (layer - 2 * queries * tokens**2) + head * 80 / 79)
    least = least_of(plan)
    assert least.flops_ratio(plan) == pytest.approx(by_hand / needed)
    # On eight devices; nothing is needed twice.
    assert (
        sum(least.parts.values()) == pytest.approx(8 * needed) and least.parts["layers again"] == 0
    )
    assert least.parts["head backward"] == pytest.approx(8 * 4 * 2 * head * 80 / 79)


def test_what_a_token_of_decode_needs(plan):
    """By hand: all float32 parameters but no embedding beside the output matrix, and the rows'
    caches.
    """
    model = plan.run.model
    engine = plan.engine
    assert model.tie_word_embeddings
    cache = (
        2
        * model.num_layers
        * engine.rows
        // 8
        * engine.slots
        * model.num_kv_heads
        * model.head_dim
        * 4
    )
    assert decode_bytes(plan) == num_params(model) * 4 + cache
    ratio = account_record(plan)["decode_traffic_over_least"]
    assert ratio == plan.programs["decode"].account.traffic / decode_bytes(plan) > 1


def _moved(program, *kinds):
    """Executions of the float32 collectives of matrices, by their dimensions, sorted."""
    found = collections.Counter()
    for one in program.account.collectives:
        if (
            one.kind in kinds
            and one.array.dtype == "f32"
            and len(one.array.dims) == 2
            and one.array.size >= 1024
        ):
            found[tuple(sorted(one.array.dims))] += one.count
    return found


def test_every_parameter_is_gathered_once_a_pass_and_reduced_once(plan):
    """Two mini-batches of two micro-batches: four gradients, and p^Train of the second mini-batch,
    two passes more.
    """
    step = plan.programs["step"]
    model = plan.run.model
    hidden = model.hidden_size
    wide = model.intermediate_size
    layers = model.num_layers
    queries = model.num_heads * model.head_dim
    # On a CPU the matrices of q, k and v are one.
    fused = queries + 2 * model.num_kv_heads * model.head_dim
    # Forward and backward of each gradient, and the two passes.
    passes = 2 * 4 + 2
    gathered = _moved(step, "all-gather")
    # The embedding is the output matrix too, which comes in eight pieces. For lookups it stays
    # where it is.
    pieces = (model.vocab_size // 8, hidden)
    assert gathered == {
        (hidden, hidden): passes * layers,
        (hidden, fused): passes * layers,
        (hidden, wide): 3 * passes * layers,
        pieces: 8 * passes,
    }
    assert _moved(step, "all-reduce", "reduce-scatter") == {
        (hidden, hidden): 4 * layers,
        (hidden, fused): 4 * layers,
        (hidden, wide): 3 * 4 * layers,
        pieces: 8 * 4,
    }


def test_what_the_checks_find(plan):
    """The plain attention of a CPU has a matrix of scores; nothing else that a large model must not
    have.
    """
    step = dataclasses.replace(plan.programs["step"], seconds=180.0)
    plan = dataclasses.replace(plan, programs={"step": step})
    no_logits, no_scores, no_tree, operations, _, seconds = check_goals(plan)
    assert no_logits.holds and no_tree.holds and operations.holds and seconds.holds
    # Two key-value heads, and the two query heads of each along the queries.
    assert not no_scores.holds and no_scores.found == "f32[1,2,160,80] in step"
    assert operations.found == f"{least_of(plan).flops_ratio(plan):.2f}"
    slow = dataclasses.replace(step, seconds=181.0)
    assert not check_goals(dataclasses.replace(plan, programs={"step": slow}))[-1].holds


def test_no_array_of_all_tokens_and_the_vocabulary(plan):
    arrays = plan.programs["step"].account.arrays
    vocab = plan.run.model.vocab_size
    # Logits exist for an eighth of the 104 tokens of the vocabulary at a time.
    assert any(array.dims == (79, vocab // 8) for array in arrays)
    assert all_logits(arrays, 79, model_shapes(plan.run.model, plan.run.placement.mesh)) == []


def test_replayed_experts_are_in_the_programs():
    """Eight experts, two of them for a token, four layers, int16."""
    changes = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    config = small_config(rollout__router_replay=True)
    architecture = dataclasses.replace(config.model.architecture, **changes)
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, architecture=architecture)
    )
    plan = compile_and_count(config, EIGHT_CHIPS, only=("prefill",))
    # [M, A, R, L, layers, k] of two mini-batches of two micro-batches of eight rows.
    shapes = [leaf.shape for leaf in jax.tree.leaves(plan.step.trace().in_avals)]
    assert (2, 2, 8, 80, 4, 2) in shapes
    # A prompt on each device.
    assert Array("s16", (1, 64, 4, 2)) in plan.programs["prefill"].account.arrays


def test_the_lines_and_the_record(plan):
    text = "\n".join(describe_account(plan))
    record = account_record(plan)
    for heading in (
        "compiled; GiB",
        "operations of a step",
        "memory traffic (compiled",
        "estimate from the data sheet",
        "checks of the compiled",
    ):
        assert heading in text
    step = record["programs"]["step"]
    assert step["product_flops"] == plan.programs["step"].account.flops.products
    assert step["peak_bytes"] == plan.programs["step"].peak and len(record["checks"]) == 6


def test_the_command_writes_what_it_prints(monkeypatch, tmp_path, capsys, plan):
    monkeypatch.setattr(compiled, "load_topology", lambda name: EIGHT_CHIPS)
    monkeypatch.setattr(compiled, "compile_and_count", lambda config, topology, only: plan)
    argv = [
        "compiled",
        "--config=configs/qwen3_8b.py:local,debug",
        "--topology=v5e:2x4",
        f"--json={tmp_path}/c.json",
    ]
    assert compiled.main([*argv, "--lengths=lognormal(8,16)"]) == 0
    assert "collectives of a step" in capsys.readouterr().out
    record = json.loads((tmp_path / "c.json").read_text())
    found = record["at_lengths"]
    worst = record["programs"]["step"]["roofline_seconds"]["overlapped"]
    # Two mini-batches of two micro-batches of a row of 80 tokens on each device; time goes with the
    # positions.
    assert record["fits"] and found["worst_computed"] == 2 * 2 * 8 * 80 >= found["computed"]
    assert found["seconds"] / worst == pytest.approx(found["computed"] / 2560)


def test_the_pages_table_is_that_of_the_records():
    """Peak, operations, communication, padding, times and compilation of each configuration of
    docs/plan.md.
    """
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    records = sorted((ROOT / "docs" / "plans").glob("*.json"))
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        at = record["at_lengths"]
        usable = record["usable_bytes"] / 2**30
        figures = [
            f"{record['topology']} | {record['phases']['step']['peak_bytes'] / 2**30:.2f}, "
            f"{usable:.4g}",
            f"{record['compiled_over_model_flops']:.2f} | {record['communicated_over_least']:.2f}",
            f"{at['computed_over_real']:.2f} | {at['seconds']:.1f}, {at['worst_seconds']:.1f} "
            f"| {record['programs']['step']['compile_seconds']:.0f} s |",
        ]
        assert any(all(figure in line for figure in figures) for line in page.splitlines()), figures
    assert len(records) == page.count(": fits |")

"""What else a replica in Ray may be: of another Python, of two workers, quantized, of adapters, one
of each trainer.
"""

import importlib.util
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

from dcmdp_jax.engines.protocol import SamplingParams
from tests.support.processes import free_port
from tests.support.processors import skip_unless_computed
from tests.support.ray_tools import place_of, ray_nodes
from tests.support.runs import finish, read_records
from tests.support.runs import start as start_run
from tests.support.sampling import assert_same_samples, sample
from tests.support.vllm_tools import STOP, prompts, random_params, small_model
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("vllm_is_installed"),
    pytest.mark.skipif(
        not importlib.util.find_spec("ray"), reason="Ray is not installed (extra ray)"
    ),
]
CONFIG = small_model()
SAMPLED = SamplingParams(group_size=2, max_completion_tokens=24, stop_token_ids=(STOP,))
RUN = (
    "--config.training.steps=3",
    "--config.evaluation.every_steps=0",
    "--config.warmup.steps=0",
    "--config.rollout.max_completion_tokens=16",
)


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """This interpreter by another name, which marks its processes."""
    script = tmp_path_factory.mktemp("bin") / "python"
    script.write_text(f'#!/bin/sh\nDCMDP_OTHER=1 exec {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def _pushed_and_sampled(engine):
    found = []
    for version in (1, 2):
        engine.sync_weights(random_params(CONFIG, version), version)
        found.append(sample(engine, prompts(20, CONFIG), SAMPLED, seed=3, step=version))
    scores = engine.score(found[-1].prompt_ids, found[-1].completion_ids, temperature=1.0)
    return found, scores


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "int8"},
        {"precision": "fp8_per_block"},
        {"precision": "bfloat16", "kv_cache_dtype": "fp8"},
        {"tensor_parallel_size": 2},
        {"python": True},
    ],
    ids=str,
)
def test_the_bits_of_a_sidecar(start, nodes, python, options):
    """Two weight syncs and their samples. Two workers of a replica are on one node, whose resource
    is the replica's.
    """
    skip_unless_computed(options.get("precision", "float32"), options.get("kv_cache_dtype", "auto"))
    other = options.pop("python", False)
    local = start(CONFIG, **options)
    expected, scores = _pushed_and_sampled(local)
    local.close()
    engine = start(
        CONFIG, **options, placement="ray", address=nodes.address, python=python if other else ""
    )
    found, found_scores = _pushed_and_sampled(engine)
    for one, another in zip(found, expected, strict=True):
        assert_same_samples(one, another)
    for one, another in zip(found_scores, scores, strict=True):
        np.testing.assert_array_equal(one, another)
    process = Path(f"/proc/{place_of(engine, 0)[1]}")
    assert (b"DCMDP_OTHER=1" in (process / "environ").read_bytes().split(b"\0")) == other
    engine.close()
    wait_until(lambda: not process.exists(), "the actor to end")


def _by_ray(nodes):
    return ("--config.rollout.vllm.placement=ray", f"--config.rollout.vllm.address={nodes.address}")


def _records(run_dir):
    return {
        step: {name: value for name, value in record.items() if not name.startswith("replica/")}
        for step, record in read_records(run_dir).items()
    }


def test_merged_adapters_give_the_metrics_of_a_sidecar(run_environment, nodes, tmp_path):
    adapters = ("--config.model.lora_rank=4", "--config.model.lora_alpha=6", *RUN)
    for name, placement in (("local", ()), ("ray", _by_ray(nodes))):
        finish(
            start_run(
                run_environment,
                tmp_path / name,
                [*adapters, *placement],
                config="configs/demo_vllm.py:debug",
            )
        )
    assert "mismatch/merge_rounding" in read_records(tmp_path / "ray")[3]
    assert _records(tmp_path / "ray") == _records(tmp_path / "local")


def test_two_trainers_with_a_replica_each_are_like_one_process_with_one_engine(
    run_environment, nodes, tmp_path
):
    """To the rounding of two reductions, and of vLLM in other batches."""
    config = "configs/demo_vllm.py:debug,float32"
    settings = [*RUN, "--config.mesh.data=2", "--config.mesh.fsdp=1"]
    alone = [*settings, "--config.mesh.cpu_devices=2"]
    finish(start_run(run_environment, tmp_path / "one", alone, config=config))
    settings += [
        "--config.mesh.cpu_devices=1",
        f"--config.hosts.coordinator=localhost:{free_port()}",
        "--config.hosts.processes=2",
        *_by_ray(nodes),
    ]
    two = [
        start_run(
            run_environment,
            tmp_path / "two",
            [*settings, f"--config.hosts.process={number}"],
            config=config,
        )
        for number in (0, 1)
    ]
    for process in two:
        finish(process)
    found = _records(tmp_path / "two")
    expected = _records(tmp_path / "one")
    assert set(found) == set(expected) == {1, 2, 3}
    for step, record in expected.items():
        # Tokens are the same; lambda and c follow delta, which is rounding alone between two
        # engines in float32.
        assert found[step]["reward/mean"] == record["reward/mean"], step
        assert found[step] == pytest.approx(record, rel=1e-3, abs=1e-4), step
    assert len({place.read_text() for place in (tmp_path / "two").glob("vllm*/nodes.txt")}) == 2

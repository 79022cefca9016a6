"""The step, and the passes before it, are compiled once, in threads, before their first call."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax._src import compiler

from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.parallel.hosts import ONE_PROCESS, SeveralHosts
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.run_plan import planned_run
from dcmdp_jax.training.step_programs import make_step_programs
from tests.support.processes import demo

# bin.train, which prints what is compiled, and in which thread.
_TELLS = """
import threading
from jax._src import compiler
from dcmdp_jax.commands import failures, train

compile_program = compiler.compile_or_get_cached

def told(backend, computation, *arguments, **options):
    name = str(computation.operation.attributes["sym_name"]).strip('"').removeprefix("jit_")
    print(f"\\n{threading.current_thread().name}: {name}\\n", end="", flush=True)  # in one piece, of several threads
    return compile_program(backend, computation, *arguments, **options)

compiler.compile_or_get_cached = told
failures.run_main(train.main)
"""


def test_the_step_is_compiled_beside_the_start_and_kept(monkeypatch):
    found = []
    library = compiler.compile_or_get_cached

    def counted(backend, computation, *arguments, **options):
        found.append(
            (str(computation.operation.attributes["sym_name"]), threading.current_thread().name)
        )
        return library(backend, computation, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    config = qwen3_8b.get_config("local,debug")
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = "float32"
    run = planned_run(from_config_dict(config), make_mesh(1, 2, 1, devices=jax.devices()[:2]))
    programs = make_step_programs(run.config, run.model, run.placement)
    programs.compile_ahead(ONE_PROCESS)()
    steps = [thread for name, thread in found if "step" in name]
    assert steps == ["compiling the step"]
    programs.train_step.lower(*programs.arguments).compile()
    assert len([name for name, _ in found if "step" in name]) == 1


def test_processes_wait_for_what_main_threads_compile_and_for_nothing_else(monkeypatch):
    """A thread's compilation counts as no barrier of the main thread.

    Threads compile in another order on each host.
    """
    waited = []
    hosts = object.__new__(SeveralHosts)
    hosts._client = SimpleNamespace(
        wait_at_barrier=lambda name, limit, processes: waited.append((name, processes))
    )
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda backend, name, devices: name)
    of_both, of_one = (
        np.array([SimpleNamespace(process_index=each) for each in of]) for of in ((1, 0), (0, 0))
    )
    with hosts.starting_programs_together():
        for devices in (of_both, of_one, of_both):
            assert compiler.compile_or_get_cached(None, "program", devices) == "program"
            (
                thread := threading.Thread(
                    target=compiler.compile_or_get_cached, args=(None, "step", devices)
                )
            ).start()
            thread.join()
    assert waited == [("dcmdp/compiled/0-1/1", [0, 1]), ("dcmdp/compiled/0-1/2", [0, 1])]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Each adds or replaces columns of the batch: those of the next one.
        (
            (
                "model.lora_rank=4",
                "rollout.precision=exact",
                "rollout.lag=1",
                "rollout.top_logprobs=4",
            ),
            {"train_step": "the step", "rescore": "rescore", "old_logprobs": "old_logprobs"},
        ),
        # The step gets frozen parameters, which nobody has read when it compiles.
        (("algorithm.kl_coefficient=0.1",), {"train_step": "the step"}),
        (("model.lora_rank=4", "model.lora_base=int8"), {"train_step": "the step"}),
        (
            ("model.lora_rank=4", "algorithm.kl_coefficient=0.1", "mesh.cpu_devices=2"),
            {"train_step": "the step"},
        ),
    ],
)
def test_a_run_compiles_no_pass_over_its_batch_in_the_main_thread(
    run_environment, tmp_path, settings, expected
):
    flags = [f"--config.{setting}" for setting in ("training.steps=2", "warmup.steps=0", *settings)]
    output = demo(tmp_path / "run", *flags, program=("-c", _TELLS), env=run_environment).stdout
    found = [
        line.split(": ")
        for line in output.splitlines()
        if line.endswith(tuple(f": {name}" for name in expected))
    ]
    assert sorted(found) == sorted(
        [f"compiling {thread}", name] for name, thread in expected.items()
    )

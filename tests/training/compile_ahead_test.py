"""The step is compiled once, in a thread, before its first call."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
from jax._src import compiler

from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.parallel.hosts import ONE_PROCESS, SeveralHosts
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.plan.run_plan import planned_run
from dcmdp_jax.training.build import make_step_programs


def test_the_step_is_compiled_beside_the_start_and_kept(monkeypatch):
    found = []
    library = compiler.compile_or_get_cached

    def counted(backend, computation, *arguments, **options):
        found.append((str(computation.operation.attributes["sym_name"]), threading.current_thread().name))
        return library(backend, computation, *arguments, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", counted)
    config = qwen3_8b.get_config("local,debug")
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = "float32"
    run = planned_run(from_config_dict(config), make_mesh(1, 2, 1, devices=jax.devices()[:2]))
    programs = make_step_programs(run.config, run.model, run.placement)
    programs.compile_ahead(ONE_PROCESS)()
    steps = [thread for name, thread in found if "step" in name]
    assert steps == ["compiling the step"]
    programs.train_step.lower(*programs.arguments, None).compile()
    assert len([name for name, _ in found if "step" in name]) == 1


def test_processes_wait_for_what_main_threads_compile_and_for_nothing_else(monkeypatch):
    """Threads compile in another order on each host: a barrier of theirs would be counted as one of the main thread."""
    waited = []
    hosts = object.__new__(SeveralHosts)
    hosts._client = SimpleNamespace(wait_at_barrier=lambda name, limit, processes: waited.append((name, processes)))
    monkeypatch.setattr(compiler, "compile_or_get_cached", lambda backend, name, devices: name)
    of_both, of_one = (np.array([SimpleNamespace(process_index=each) for each in of]) for of in ((1, 0), (0, 0)))
    with hosts.starting_programs_together():
        for devices in (of_both, of_one, of_both):
            assert compiler.compile_or_get_cached(None, "program", devices) == "program"
            (thread := threading.Thread(target=compiler.compile_or_get_cached, args=(None, "step", devices))).start()
            thread.join()
    assert waited == [("dcmdp/compiled/0-1/1", [0, 1]), ("dcmdp/compiled/0-1/2", [0, 1])]

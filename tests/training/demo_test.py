"""The demo as `make demo` runs it, whole: it learns, and its record holds together."""

import os
from pathlib import Path

import pytest

from dcmdp_jax.observe.metrics_io import read_metrics
from tests.support.processes import finished
from tests.support.run_invariants import contradictions

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The run that `make demo` left, where DEMO_RUN names it, else a run of its own."""
    if "DEMO_RUN" in os.environ:
        return Path(os.environ["DEMO_RUN"])
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu"
    }
    # Two devices whatever the machine: what is merged over devices is part of the record.
    finished(
        "-m",
        "bin.train",
        "--config=configs/demo.py",
        f"--config.run_dir={tmp_path}/run",
        "--config.mesh.cpu_devices=2",
        env=environment,
    )
    return tmp_path / "run"


def test_the_demo_learns_and_records_nothing_that_contradicts_itself(run_dir):
    assert contradictions(run_dir) == []
    steps, scores = read_metrics(run_dir)["eval/arithmetic/avg@8"]
    assert steps.tolist() == [0, 8, 16, 24, 32, 40]
    # The config says how far it gets on which processor: about 38 points. A standard error is 4.
    assert scores[-1] > scores[0] + 0.2
    assert (run_dir / "report.html").is_file() and not (run_dir / "error.log").exists()

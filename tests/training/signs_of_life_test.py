"""What a run says of itself from its first line to its last: no phase is silent."""

import json

from tests.support.processes import finished

# bin.train. What takes long in it is compiling: the programs that are compiled while nothing is
# said are counted.
_PROGRAM = """
import json
import jax
from dcmdp_jax import activity
from dcmdp_jax.commands import failures, train

register, end = activity.register, activity.end
running, said, silent = [], [], []

def noted_register(doing):
    running.append(doing.gerund)
    said.append(doing.gerund)
    return register(doing)

def noted_end(doing):
    end(doing)
    if running:  # none at the start of a command that the console did not begin
        running.pop()

def noted_program(event, seconds, **fields):
    if event.endswith("backend_compile_duration") and not running:
        silent.append(fields["fun_name"])

activity.register, activity.end = noted_register, noted_end
jax.monitoring.register_event_duration_secs_listener(noted_program)
try:
    failures.run_main(train.main)
finally:
    print("FOUND " + json.dumps([silent, sorted(set(said))]))
"""


def test_no_program_of_a_run_is_compiled_without_a_word(tmp_path):
    run = (
        f"--config=demo:debug --config.run_dir={tmp_path}/run --config.warmup.steps=60 "
        "--config.training.steps=2"
    )
    printed = finished("-c", _PROGRAM, *run.split()).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    silent, said = json.loads(line.removeprefix("FOUND "))
    # Conversions of numbers and the keys of rows, each a handful of operations.
    assert set(silent) <= {"jit(convert_element_type)", "jit(row_keys)"}
    assert {
        "SFT warm start (it compiles first)",
        "drawing fresh weights",
        "training",
        "drawing the report",
    } <= set(said)
    assert not [what for what in said if "files" in what or "loading" in what], (
        "the model is a fresh one"
    )

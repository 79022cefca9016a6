"""What a run says of itself from its first line to its last: no phase is silent."""

import json

from tests.support.processes import finished

# bin.train. Processor time, which no other program of a busy machine adds to.
_PROGRAM = """
import json, time
from dcmdp_jax import activity
from dcmdp_jax.commands import cli, train

register, end = activity.register, activity.end
running, said, silent, last = [], [], [], [("start", time.process_time())]

def noted_register(doing):
    if not running:
        before, at = last[0]
        silent.append((time.process_time() - at, f"between '{before}' and '{doing.what}'"))
    running.append(doing.what)
    said.append(doing.what)
    return register(doing)

def noted_end(doing):
    end(doing)
    if not running:  # the start of a command that the console did not begin
        return
    running.pop()
    last[0] = doing.what, time.process_time()

activity.register, activity.end = noted_register, noted_end
try:
    cli.run_main(train.main)
finally:
    print("FOUND " + json.dumps([max(silent), sorted(set(said))]))
"""


def test_nothing_of_a_run_takes_longer_than_its_sign_without_a_word(tmp_path):
    run = f"--config=demo:debug --config.run_dir={tmp_path}/run --config.warmup.steps=60 --config.training.steps=2"
    printed = finished("-c", _PROGRAM, *run.split()).stdout
    [line] = [line for line in printed.splitlines() if line.startswith("FOUND ")]
    (seconds, where), said = json.loads(line.removeprefix("FOUND "))
    # What is shown on a terminal is shown after 3 s.
    assert seconds < 3, where
    assert {"warming up (it compiles first)", "drawing fresh weights", "training", "drawing the report"} <= set(said)
    assert not [what for what in said if "files" in what or "loading" in what], "the model is a fresh one"

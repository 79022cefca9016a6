"""The date that a chat template writes is that of the run's first start, on every day, in every
time zone.
"""

import json
import types

import numpy as np
import pytest

from dcmdp_jax.commands.flags import load_config
from dcmdp_jax.config.load import for_supervision
from dcmdp_jax.data.arithmetic import CHAT_TEMPLATE, build_tokenizer
from dcmdp_jax.data.prompts import encode_prompts
from dcmdp_jax.data.tokenizer import load_tokenizer, save_tokenizer
from dcmdp_jax.environments.turns import answer_text
from dcmdp_jax.parallel.hosts import Hosts
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.run.run import Run
from dcmdp_jax.run.saved_model import Policy, SavedModel
from tests.support.runs import finish, read_digests, start

# A date as Llama 3.2's template writes it, within a macro.
_DATED = """{%- macro today(form) -%}
{%- if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now(form) }}{% endif -%}
{%- endmacro -%}
"""
_FIRST = "2026-03-01T23:59:58+1400"


def _tokenizer(directory, form):
    """The built-in tokenizer with a template whose first line is a date."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = _DATED + "{{ today('" + form + "') }}\n" + CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return str(directory)


def _config(tmp_path, form, **settings):
    rows = [{"prompt": f"{number}+1=?", "completion": "1", "answer": "1"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "task.train": str(tmp_path / "rows.jsonl"),
        "evaluation.every_steps": 0,
        "task.max_prompt_tokens": 120,
    }
    given |= {"training.prompts_per_step": 8, "training.prompts_per_mini_batch": 8}
    given |= {
        "model.tokenizer": _tokenizer(tmp_path / "tok", form),
        "run_dir": str(tmp_path / "run"),
    }
    return load_config("demo:debug", given | settings)


def _first_line(tokenizer, ids):
    return tokenizer.decode(ids).partition("\n")[0]


def _started(run_dir, *lines):
    run_dir.mkdir()
    (run_dir / "starts.jsonl").write_text(
        "".join(json.dumps({"step": 0, "time": line}) + "\n" for line in lines)
    )


@pytest.mark.parametrize(
    ("form", "written"),
    # A wall clock: the zone of the first start counts, and a zone is not written, as in
    # transformers.
    [
        ("%d %b %Y", "01 Mar 2026"),
        ("%A", "Sunday"),
        ("%Y-%m-%d %H:%M:%S%z", "2026-03-01 23:59:58"),
        ("%j", "060"),
    ],
)
@pytest.mark.parametrize("supervised", [False, True])
def test_a_resumed_run_and_its_evaluation_have_the_date_of_the_first_start(
    tmp_path, form, written, supervised
):
    config = _config(tmp_path, form)
    _started(tmp_path / "run", _FIRST, "2026-03-04T08:00:00+0000")
    task = Run.check(for_supervision(config) if supervised else config).task
    assert {_first_line(task.tokenizer, ids) for ids in task.train.token_ids} == {written}
    # An evaluation has the tokenizer that the run saved.
    save_tokenizer(task.tokenizer, tmp_path / "run" / "tokenizer", task.stop_token_ids)
    saved = SavedModel(
        name="run",
        shape=task.model,
        tokenizer=tmp_path / "run" / "tokenizer",
        path=tmp_path / "run",
        checkpoint=types.SimpleNamespace(step=1),
        files=(),
    )
    policy = Policy.of(saved, config)
    asked = encode_prompts(
        [Problem("1+1=?", "2", "source", 0)], policy.tokenizer, max_prompt_tokens=120
    )
    assert _first_line(policy.tokenizer, asked.token_ids[0]) == written


def test_a_date_in_the_templates_variables_wins(tmp_path):
    config = _config(
        tmp_path, "%d %b %Y", **{"task.chat_template_kwargs": '{"date_string": "26 Jul 2024"}'}
    )
    _started(tmp_path / "run", _FIRST)
    task = Run.check(config).task
    assert _first_line(task.tokenizer, task.train.token_ids[0]) == "26 Jul 2024"


def test_the_clock_itself_is_no_variable(tmp_path):
    config = _config(
        tmp_path, "%d", **{"task.chat_template_kwargs": '{"strftime_now": "26 Jul 2024"}'}
    )
    with pytest.raises(
        ValueError, match=r"^config\.task\.chat_template_kwargs: 'strftime_now' is set by"
    ):
        Run.check(config)


def test_hosts_in_two_time_zones_write_the_date_of_the_first(tmp_path):
    class Second(Hosts):
        """A process as it stands behind the collective methods, beside one in another time zone."""

        def gather(self, value, *types):
            return [_FIRST, value]

    task = Run.check(_config(tmp_path, "%d %b %Y"), Second()).task
    assert _first_line(task.tokenizer, task.train.token_ids[0]) == "01 Mar 2026"


def test_a_loaded_tokenizer_writes_one_moment(tmp_path):
    """Renderings are compared token by token: a clock of microseconds must stand still."""
    tokenizer = load_tokenizer(_tokenizer(tmp_path / "tok", "%H:%M:%S.%f"))
    question = [Problem("1+1=?", "2", "source", 0)]
    first, second = (
        encode_prompts(question, tokenizer, max_prompt_tokens=120).token_ids[0] for _ in range(2)
    )
    np.testing.assert_array_equal(first, second)
    answer = [{"role": "user", "content": "again"}]
    assert answer_text(tokenizer, answer, {}) == answer_text(tokenizer, answer, {})
    save_tokenizer(tokenizer, tmp_path / "saved", (2,))
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.chat_template == tokenizer.chat_template


def test_a_run_goes_on_where_it_is_another_day(run_environment, tmp_path):
    """26 hours lie between these time zones, so the dates always differ."""
    config = _config(tmp_path, "%d %b %Y")
    words = [
        f"task.train={config.task.train}",
        f"model.tokenizer={config.model.tokenizer}",
        "mesh.cpu_devices=1",
    ]
    words = [
        f"--config.{word}"
        for word in (*words, "task.max_prompt_tokens=120", "evaluation.every_steps=0")
    ]
    for steps, zone in ((1, "UTC-14"), (2, "UTC+12")):
        environment = {**run_environment, "TZ": zone}
        settings = [*words, f"--config.training.steps={steps}"]
        finish(start(environment, tmp_path / "run", settings, program=("-m", "bin.sft")))
    finish(
        start(
            run_environment | {"TZ": "UTC-14"},
            tmp_path / "whole",
            settings,
            program=("-m", "bin.sft"),
        )
    )
    assert read_digests(tmp_path / "run", 2) == read_digests(tmp_path / "whole", 2)

"""Shapes that a config is computed in."""

import jax
import pytest

from configs import demo
from dcmdp_jax.config import from_config_dict
from dcmdp_jax.training import setup


@pytest.fixture(autouse=True)
def _one_device(monkeypatch):
    monkeypatch.setattr(setup, "training_devices", lambda: jax.devices()[:1])


def _packing(tmp_path, **changes):
    config = demo.get_config()
    config.run_dir, config.warmup.steps, config.evaluation.every_steps = str(tmp_path / "run"), 0, 0
    for name, value in changes.items():
        section, field = name.split("__")
        setattr(config[section], field, value)
    plan = setup.make_plan_of_run(from_config_dict(config))
    return plan.packing, setup.describe(plan)


def test_rows_of_one_length_share_their_prompts(tmp_path):
    # 24 prompts x 8 in a mini-batch, prompts of 20 tokens and completions of 36: rows of 36 + 1 of which 36 are
    # computed; prompts of 19, widened by 9 so that a row sees 64 tokens. All of it fits into 16,384 tokens.
    packing, told = _packing(tmp_path)
    assert (packing.row_lengths, packing.rows_per_micro_batch, packing.micro_batches) == ((37,), (192,), (1,))
    assert (packing.group_size, packing.prompt_length) == (8, 28)
    assert "192 x 37 tokens, prompts of 28 computed once for 8 rows" in told


# A group is 8 x 36 + 20 = 308 tokens.
@pytest.mark.parametrize(
    "changes",
    [
        {"training__row_lengths": (40, 56)},
        {"training__segments_per_row": 2},
        {"training__micro_batch_tokens": 307},
    ],
)
def test_others_have_their_prompts_to_themselves(tmp_path, changes):
    packing, told = _packing(tmp_path, **changes)
    assert packing.group_size == 0 and packing.row_lengths[-1] == 56
    assert "computed once" not in told


def test_several_devices_have_prompts_in_their_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "training_devices", jax.devices)
    assert jax.device_count() == 8
    assert _packing(tmp_path)[0].group_size == 0

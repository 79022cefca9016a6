"""The card of a recorded run: its numbers at the checkpoint's step, not later ones."""

import json
import shutil
from pathlib import Path

import yaml

from dcmdp_jax.commands.convert import model_card

_RUN = Path(__file__).resolve().parents[1] / "recorded" / "run_of_0_1_0"


def test_the_card_has_budget_curve_floor_engine_versions_command_and_citation(tmp_path):
    run = tmp_path / "mine"
    shutil.copytree(_RUN, run)
    start = {
        "step": 0,
        "time": "2026-11-24T10:00:00+0000",
        "command": "train --config=demo",
        "commit": "abc",
    }
    start |= {"version": "0.1.0", "python": "3.11.7", "jax": "0.10.2", "machine": "1 x cpu"}
    (run / "starts.jsonl").write_text(json.dumps(start) + "\n")
    card = model_card(run, 2)
    assert yaml.safe_load(card.split("---")[1])["tags"] == [
        "dcmdp_jax",
        "dc-grpo",
        "grpo",
        "reinforcement-learning",
    ]
    # metrics.jsonl: c 0.0006; lambda 0.1 and 0.071538; means 3.0760e-05 and 3.2593e-05; floor
    # 1.87904e-09 at step 1.
    assert (
        "| Lambda, lowest and highest | 0.07154 to 0.1 | rose 0 times, fell 1 times; last 0.07154 |"
        in card
    )
    assert r"step 1: mean \|p - q\| 1.879e-09 from decode to prefill" in card
    # (3.0760e-05 + 3.2593e-05) / 2
    assert (
        "| Mean discrepancy | 3.168e-05 | tolerance c = 0.0006, exceeded in 0.0% of steps |" in card
    )
    assert "| Noise floor | 1.879e-09 |" in card
    assert "\n- trained: 2 training steps\n- score: validation arithmetic/avg@2 from 0.0% " in card
    assert "| 1 | 0.1 | 3.076e-05 | 0.0006 | 0 |\n| 2 | 0.07154 | 3.259e-05 | 0.0006 | 0 |" in card
    config = json.loads((run / "config.json").read_text())
    assert (
        f"| Engine | {config['rollout']['engine']} | precision {config['rollout']['precision']}"
        in card
    )
    assert (
        "    train --config=demo\n" in card
        and "dcmdp_jax 0.1.0, commit abc, 1 x cpu, jax 0.10.2" in card
    )
    assert "@article{" in card and "Liu, Jiashun" in card
    first = model_card(run, 1)
    assert "fell 0 times; last 0.1 |" in first and "0.07154" not in first


def test_a_run_without_records_has_a_card_without_numbers(tmp_path):
    card = model_card(tmp_path, 3)
    assert f"# {tmp_path.name}, step 3" in card and "curve" not in card and "@article{" in card


def test_the_base_model_is_the_one_on_the_hub_that_the_run_started_from(tmp_path):
    for path, base in [
        ("Qwen/Qwen3-0.6B@abc1", "Qwen/Qwen3-0.6B"),
        ("models/mine", None),
        ("/mnt/x/y", None),
        ("", None),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"model": {"path": path}}))
        front = yaml.safe_load(model_card(tmp_path, 1).split("---")[1])
        assert front.get("base_model") == base

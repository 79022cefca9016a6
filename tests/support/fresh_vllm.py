"""Stock vLLM on exported checkpoints, by its own loader and none of our code: what a live engine
must repeat.

    python fresh_vllm.py REQUEST.json ANSWER.json

REQUEST: directories, llm (arguments), prompts (token ids), samplings (arguments of SamplingParams,
a seed per prompt). ANSWER: per directory and sampling, per prompt, [token ids, log-probs as
float.hex].
"""

import gc
import json
import os
import sys

os.environ |= dict.fromkeys(
    "TORCHDYNAMO_DISABLE OMP_NUM_THREADS HF_HUB_OFFLINE VLLM_NO_USAGE_STATS".split(), "1"
)
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

import torch  # noqa: E402

if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    answer = []
    for directory in request["directories"]:
        llm = LLM(model=directory, load_format="safetensors", **request["llm"])
        answer.append([])
        for sampling in request["samplings"]:
            seeds = sampling.pop("seeds", [None] * len(request["prompts"]))
            params = [
                SamplingParams(**sampling, seed=seed, flat_logprobs=True, logprobs=0)
                for seed in seeds
            ]
            given = [{"prompt_token_ids": ids} for ids in request["prompts"]]
            outputs = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
            answer[-1].append(
                [
                    [list(out.token_ids), [float(x).hex() for x in out.logprobs.logprobs]]
                    for out in outputs
                ]
            )
            sampling["seeds"] = seeds
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()

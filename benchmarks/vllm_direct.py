"""Stock `LLM.generate` on random weights, for benchmarks/vllm.py: a line in, a call, its seconds
out.

python -m benchmarks.vllm_direct REQUEST.json
"""

import json
import os
import sys
import time

with open(sys.argv[1], encoding="utf-8") as file:
    REQUEST = json.load(file)
os.environ |= REQUEST["environment"]

import torch  # noqa: E402

if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    llm = LLM(**REQUEST["llm"])
    params = [
        SamplingParams(
            max_tokens=REQUEST["tokens"],
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
        )
        for seed in REQUEST["seeds"]
    ]
    prompts = [{"prompt_token_ids": ids} for ids in REQUEST["prompts"]]
    print("ready", flush=True)
    for _ in sys.stdin:
        llm.reset_prefix_cache()
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print("seconds", time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()

"""DC-GRPO on Qwen3-8B with DAPO-Math-17K: the paper's main runs (section 6; 8B rows of its Tables 1 and 2).

    python -m bin.train --config=configs/qwen3_8b.py                                     BF16 training, BF16 rollout
    python -m bin.train --config=configs/qwen3_8b.py:grpo                                the baseline
    python -m bin.train --config=configs/qwen3_8b.py --config.rollout.precision=fp8      weight-only FP8 emulation

`models/Qwen3-8B` is the model's Hugging Face directory: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`. The
paper used 8 GPUs and vLLM. It reports, as the average over six benchmarks: BF16 GRPO 67.3, DC-GRPO 71.0; FP8 rollout
GRPO 64.7, DC-GRPO 68.1. This project has not run the config at full size.

`rollout.precision=fp8` is not the FP8 of the paper's Table 2, which is FP8 inference in vLLM: weights and activations
(W8A8). It is an emulation in the embedded engine: FP8 weights, BF16 activations and products. Every compiled program
dequantizes all weights to BF16 first, so it needs more memory than BF16. The nearest to the paper is
`rollout.engine=vllm` with `rollout.precision=fp8_per_block`, which has not run on a GPU.

`:debug` runs the same code at toy size on a CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/qwen3_8b"
    config.model.path = "models/Qwen3-8B"
    config.task.train = "BytedTsinghua-SIA/DAPO-Math-17k"
    # The paper's constants are the defaults; named again because this file is what they belong to.
    config.algorithm.multiplier = 0.1
    config.algorithm.tolerance = 0.0037
    config.algorithm.dual_learning_rate = 1.0
    config.rollout.max_completion_tokens = 8192
    return base.with_options(config, arg)

"""DC-GRPO on Qwen3-8B with DAPO-Math-17K: the paper's main runs (section 4.1; tables "BF16, 8B" and "FP8 rollout, 8B").

    python -m bin.train --config=configs/qwen3_8b.py                                     training BF16, rollout BF16
    python -m bin.train --config=configs/qwen3_8b.py --config.rollout.precision=fp8      heterogeneous: FP8 rollout
    python -m bin.train --config=configs/qwen3_8b.py:grpo                                the baseline

`models/Qwen3-8B` is the model's Hugging Face directory: `hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`. The
paper used 8 GPUs. It reports, as the average over six benchmarks: BF16 GRPO 67.3, DC-GRPO 71.0; FP8 rollout GRPO 64.7,
DC-GRPO 68.1.
`:debug` runs the same code at toy size on a CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/qwen3_8b"
    config.model.path = "models/Qwen3-8B"
    config.task.train = "BytedTsinghua-SIA/DAPO-Math-17k"
    # The paper's constants are the defaults of configs/base.py; named again because this file is what they belong to.
    config.algorithm.multiplier = 0.1
    config.algorithm.tolerance = 0.0037
    config.algorithm.dual_learning_rate = 1.0
    config.rollout.max_completion_tokens = 8192
    return base.with_options(config, arg)

"""DC-GRPO on Qwen3-8B with DAPO-Math-17K: the 8B rows of the paper's Tables 1 and 2 (section 6).

    dcmdp train --config=configs/qwen3_8b.py         # BF16 training, BF16 rollout
    dcmdp train --config=configs/qwen3_8b.py:grpo    # the baseline
    dcmdp train --config=configs/qwen3_8b.py:fp8     # FP8 rollout
    dcmdp train --config=configs/qwen3_8b.py:fp8,grpo  # its baseline
    dcmdp train --config=configs/qwen3_8b.py:local   # the embedded engine samples

`models/Qwen3-8B` is the model's Hugging Face directory: `hf download Qwen/Qwen3-8B --local-dir
models/Qwen3-8B`. The dataset needs the extra `hub`. The paper used 8 GPUs and vLLM. It reports, as
the average over six benchmarks: BF16 GRPO 67.3, DC-GRPO 71.0; FP8 rollout GRPO 64.7, DC-GRPO 68.1.
This project has not run the config at full size.

vLLM samples, as in the paper: a replica on each GPU (BUILD.md installs it). `:fp8` is the FP8 of
the paper's Table 2: vLLM with FP8 weights and activations (W8A8). `:local` samples with the
embedded engine, whose own `rollout.precision=fp8` is an emulation: FP8 weights, BF16 activations
and products.

`:debug` runs the same code at toy size on a CPU; without `:local` it needs vLLM's CPU build.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.paper_config(arg, model="Qwen3-8B", run_dir="runs/qwen3_8b")
    # The paper's constants are the defaults; named again because this file is what they belong to.
    config.algorithm.multiplier = 0.1
    config.algorithm.tolerance = 0.0037
    config.algorithm.dual_learning_rate = 1.0
    return base.with_options(config, arg, base.PAPER_OPTIONS)

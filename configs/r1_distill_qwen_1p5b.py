"""GRPO and DC-GRPO on DeepSeek-R1-Distill-Qwen-1.5B: the paper's case study (section 3, figure 2).

    dcmdp train --config=configs/r1_distill_qwen_1p5b.py:grpo --config.rollout.temperature=0.7

The study trains GRPO at sampling temperatures 0.3, 0.7 and 1.0. With the same setup the paper
compares discrepancy measures (section 4: `algorithm.method=dual_grpo`, `algorithm.measure`) and
tolerance ranges (section 5: `threshold_grpo`, `algorithm.tolerance`).
`models/DeepSeek-R1-Distill-Qwen-1.5B` is the model's Hugging Face directory (`hf download
deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --local-dir models/DeepSeek-R1-Distill-Qwen-1.5B`). The
dataset needs the extra `hub`. The paper gives curves for this model, no final numbers.

vLLM samples, as in the paper: a replica on each GPU (BUILD.md installs it). `:local` samples with
the embedded engine, `:fp8` with FP8 weights and activations in vLLM. `:debug` runs the same code at
toy size on a CPU; without `:local` it needs vLLM's CPU build.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.paper_config(
        arg, model="DeepSeek-R1-Distill-Qwen-1.5B", run_dir="runs/r1_distill_qwen_1p5b"
    )
    config = base.with_options(config, arg, base.PAPER_OPTIONS)
    if not config.model.path:  # :debug's fresh model
        config.model.architecture.model_type = "qwen2"
    return config

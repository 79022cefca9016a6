"""Every setting, once: unit, and where its default comes from.

"paper" is the DC-MDP paper, section in brackets; "ours" is a reading or a choice of this project. An experiment file
starts from this one and changes what it changes.
"""

from ml_collections import ConfigDict

OPTIONS = ("grpo", "debug")


def get_config(arg: str = "") -> ConfigDict:
    """The paper's constants (Qwen3-8B), on a model and data that are still to be named."""
    return with_options(_defaults(), arg)


def with_options(config: ConfigDict, arg: str) -> ConfigDict:
    """Applies the argument of a config file, options joined by commas.

    grpo   the baseline: no penalty, a run directory of its own.
    debug  the same code in a minute on a CPU: a fresh small model, the arithmetic task, two steps.

    Raises:
        ValueError: for an option that is neither.
    """
    options = [option for option in arg.split(",") if option]
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"config argument {unknown[0]!r}: allowed are {', '.join(OPTIONS)}, joined by commas")
    if "grpo" in options:
        config.algorithm.method = "grpo"
        config.run_dir += "_grpo"
    if "debug" in options:
        config.run_dir += "_debug"
        config.model.path = config.model.tokenizer = ""
        config.task.train = "arithmetic:difficulty=1,count=64"
        config.task.max_prompt_tokens = 64
        config.rollout.group_size = 4
        config.rollout.max_completion_tokens = 16
        config.rollout.max_rows = 32
        config.training.steps = 2
        config.training.prompts_per_step = 4
        config.training.prompts_per_mini_batch = 2
        config.training.row_lengths = (80,)
        config.warmup.steps = min(config.warmup.steps, 20)
        if config.evaluation.every_steps:
            config.evaluation.task = "arithmetic:difficulty=1,count=8,split=heldout"
            config.evaluation.samples = 2
    return config


def _defaults() -> ConfigDict:
    config = ConfigDict()

    # Directory the run writes to and resumes from.
    config.run_dir = "runs/base"

    config.model = ConfigDict()
    # Hugging Face directory (config.json, safetensors). Empty: a fresh model of `architecture`.
    config.model.path = ""
    # Tokenizer directory. Empty: the model's, or the built-in arithmetic tokenizer for a fresh model.
    config.model.tokenizer = ""
    config.model.architecture = ConfigDict()
    config.model.architecture.model_type = "qwen3"
    config.model.architecture.hidden_size = 128
    config.model.architecture.intermediate_size = 384
    config.model.architecture.num_layers = 4
    config.model.architecture.num_heads = 4
    config.model.architecture.num_kv_heads = 2
    config.model.architecture.head_dim = 32
    config.model.architecture.rope_theta = 10000.0
    config.model.architecture.tie_word_embeddings = True
    # Master parameters and Adam's moments: float32 or bfloat16 (ours; AdamW at lr 1e-6 needs float32 to move).
    config.model.param_dtype = "float32"
    # Activations and matrix products: float32 or bfloat16 (paper [4.1]: BF16).
    config.model.compute_dtype = "bfloat16"
    # What the backward pass recomputes: none, dots (keeps matrix products), full (keeps layer inputs).
    config.model.remat = "full"
    # Layers in one iteration of the scan over layers: 1 compiles fastest, all of them runs fastest on CPU.
    config.model.scan_unroll = 1
    # auto: splash on TPU, cudnn on GPU in bfloat16, else xla.
    config.model.attention = "auto"
    # Tokens whose logits exist at one time.
    config.model.logprob_chunk = 1024

    config.task = ConfigDict()
    # A .jsonl or .parquet file, a Hub data set, or arithmetic:difficulty=...; paper [4.1]: DAPO-Math-17K.
    config.task.train = ""
    # Appended to each problem's text (ours; the wording of Qwen's own maths evaluations).
    config.task.prompt_suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    # Longer prompts are dropped, counted and reported (ours), tokens.
    config.task.max_prompt_tokens = 1024
    # A malformed data row: "error" stops with its line number, "skip" counts it.
    config.task.on_bad_row = "error"
    # Processes that judge answers, and seconds an answer may take before it is reward 0.
    config.task.verifier_workers = 2
    config.task.verifier_timeout = 5.0

    config.rollout = ConfigDict()
    # local: the embedded JAX engine; vllm: stock vLLM in a process of its own.
    config.rollout.engine = "local"
    # Weights of the engine. local: exact (the training stack recomputes the log-probs: no discrepancy), float32,
    # bfloat16, int8, fp8 (quantised per output channel at each push). vllm: float32, float16, bfloat16, int8 (W8A8, per
    # channel and token), fp8_per_block.
    config.rollout.precision = "bfloat16"
    # Activations of the engine, and in vLLM all weights that are not quantised.
    config.rollout.compute_dtype = "bfloat16"
    # auto: the compute dtype; fp8: float8_e4m3fn; vllm has fp8_e5m2 too.
    config.rollout.kv_cache_dtype = "auto"
    # Completions decoded side by side; more are done in turns.
    config.rollout.max_rows = 256
    # When half of a batch is done the rest moves to a batch of half the size, down to this; each size compiles once.
    config.rollout.min_rows = 32
    # G; paper [4.1]: 8.
    config.rollout.group_size = 8
    # Tokens, end-of-sequence included; paper [4.1]: 8192.
    config.rollout.max_completion_tokens = 8192
    # Paper [4.1]: both 1.0. top_p below 1 is refused in training.
    config.rollout.temperature = 1.0
    config.rollout.top_p = 1.0
    # A log-prob that is NaN or infinite: "error" stops and names the token, "drop" leaves the completion out, counted.
    config.rollout.on_non_finite = "error"

    config.rollout.vllm = ConfigDict()
    # Interpreter that has vLLM. Empty: this one.
    config.rollout.vllm.python = ""
    # Devices that each layer is split over; experts whole on one of them each, or split too.
    config.rollout.vllm.tensor_parallel_size = 1
    config.rollout.vllm.expert_parallel = False
    # CUDA_VISIBLE_DEVICES of the sidecar, so that it has GPUs of its own. Empty: the trainer's, shared.
    config.rollout.vllm.visible_devices = ""
    # Share of each of its GPUs; on a shared one the trainer gets what is left, less a tenth (ours).
    config.rollout.vllm.memory_share = 0.4
    # GiB of the key-value cache; 0: on a GPU what memory_share leaves, on a CPU what max_rows need, at most a third of
    # the free memory.
    config.rollout.vllm.kv_cache_gib = 0.0
    # Threads of the CPU build; more than one is slow on a machine that does anything else.
    config.rollout.vllm.cpu_threads = 1
    # Further arguments of vllm.LLM, a JSON object: '{"block_size": 64}'.
    config.rollout.vllm.engine_args = ""
    # Seconds until the engine is ready, and without a sign of life during a request; then it is started again.
    config.rollout.vllm.start_timeout_s = 600.0
    config.rollout.vllm.stall_timeout_s = 300.0
    # Failures in a row after which the run ends.
    config.rollout.vllm.max_restarts = 5
    # Mean |difference| of log-probs between trainer and engine on fixed sequences after each push, nats; above it the
    # push failed. 0: 0.01, 0.2, 1 for float32, float16, bfloat16, 4 for 8 bits (ours).
    config.rollout.vllm.probe_tolerance = 0.0

    config.algorithm = ConfigDict()
    # grpo, dual_grpo (multiplier fixed at 1), threshold_grpo, dc_grpo; paper [3, 4].
    config.algorithm.method = "dc_grpo"
    # diff |p_train - p_inf|, ratio |p_train / p_inf - 1|, log |log p_train - log p_inf|; paper: diff.
    config.algorithm.measure = "diff"
    # two: absolute value; one: only p_train above p_inf is charged. Paper: two.
    config.algorithm.sided = "two"
    # token, or sequence (the completion's mean); paper: token.
    config.algorithm.level = "token"
    # lambda_0, advantage units per unit of discrepancy; paper [4.1]: 0.1 (8B), 0.05 (30B-A3B).
    config.algorithm.multiplier = 0.1
    # c, mean absolute probability difference; paper [4.1]: 0.0037 (8B), 0.0050 (30B-A3B).
    config.algorithm.tolerance = 0.0037
    # eta; paper [4.1]: 1.0.
    config.algorithm.dual_learning_rate = 1.0
    # Projection of lambda; not stated in the paper (ours).
    config.algorithm.multiplier_min = 0.0
    config.algorithm.multiplier_max = 1.0
    # Steps averaged in the dual update; 1 is the paper's update (ours).
    config.algorithm.dual_window = 1
    # Ratio clipped to [1 - low, 1 + high]; paper: high 0.24; low not stated (ours 0.2).
    config.algorithm.clip_low = 0.2
    config.algorithm.clip_high = 0.24
    # seq_mean_token_mean (paper), token_mean, fixed_length (Dr. GRPO).
    config.algorithm.aggregation = "seq_mean_token_mean"
    # Group standard deviation: ddof 1 and epsilon as in the framework the paper trained with (ours).
    config.algorithm.std_ddof = 1
    config.algorithm.std_epsilon = 1e-6
    config.algorithm.normalize_std = True
    # Leave truncated completions out of the loss (ours: off).
    config.algorithm.mask_truncated = False
    # Weight of the KL to the initial policy; paper: no KL. Estimators k1, k2, k3.
    config.algorithm.kl_coefficient = 0.0
    config.algorithm.kl_estimator = "k3"

    config.training = ConfigDict()
    # Training steps (ours).
    config.training.steps = 500
    # B; paper [4.1]: 64 prompts a step in mini-batches of 16, one optimizer update each.
    config.training.prompts_per_step = 64
    config.training.prompts_per_mini_batch = 16
    # Tokens, padding included, of one forward and backward pass (ours).
    config.training.micro_batch_tokens = 16384
    # Lengths of packed rows, rising. Empty: chosen from the length limits and the attention kernel. A single length, on
    # one device with the xla kernel, has each group's prompt computed once for all its completions.
    config.training.row_lengths = ()
    # Completions in one row at most. 0: unlimited where the kernel skips other segments (splash), else 1.
    config.training.segments_per_row = 0
    config.training.seed = 0
    # Updates with a gradient that is not finite are skipped; so many in a row stop the run (ours).
    config.training.max_skipped_in_row = 8

    config.optimizer = ConfigDict()
    # AdamW; paper [4.1]: lr 1e-6, betas (0.9, 0.95), weight decay 0, eps 1e-15.
    config.optimizer.learning_rate = 1e-6
    # constant, linear or cosine decay to 0 over all updates, after a linear rise of so many updates (ours: none).
    config.optimizer.schedule = "constant"
    config.optimizer.schedule_warmup_steps = 0
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.95
    config.optimizer.epsilon = 1e-15
    config.optimizer.weight_decay = 0.0
    # Global norm that gradients are clipped to; 0 clips nothing (ours: 1, as in the framework the paper trained with).
    config.optimizer.max_grad_norm = 1.0

    config.mesh = ConfigDict()
    # Devices along each axis; -1 is all that are left.
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.tensor = 1
    # How many devices the CPU counts as, for training and the embedded engine; 0: one for each core, at most 4.
    config.mesh.cpu_devices = 0

    config.warmup = ConfigDict()
    # Problems with worked solutions to learn from before training, as `task.train`.
    config.warmup.task = ""
    # Supervised steps; 0: none.
    config.warmup.steps = 0
    config.warmup.batch_size = 128
    config.warmup.learning_rate = 3e-3

    config.evaluation = ConfigDict()
    # Held-out problems, as `task.train`. Paper [4.1]: avg@32 and avg@4 at temperature 0.7 (bin/evaluate.py).
    config.evaluation.task = ""
    # 0: no evaluation while training.
    config.evaluation.every_steps = 0
    config.evaluation.samples = 8
    config.evaluation.temperature = 0.7
    # 0: all.
    config.evaluation.max_problems = 0

    config.checkpoint = ConfigDict()
    config.checkpoint.every_steps = 20
    # The last so many, and the best so many by held-out avg@K (none without evaluation).
    config.checkpoint.keep_last = 2
    config.checkpoint.keep_best = 1

    config.observe = ConfigDict()
    # Sample completions written to samples.jsonl.
    config.observe.samples_every_steps = 10
    config.observe.samples = 4
    # Weights & Biases project; empty: not used.
    config.observe.wandb_project = ""
    return config

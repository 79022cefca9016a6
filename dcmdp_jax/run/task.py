"""What a run learns, from its settings and files: model shape, tokenizer, problems, rewards."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.config.checks import EVALUATION, LORA, REWARDS, as_settings, in_settings
from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.config.settings import Architecture, Config, ModelSettings, RewardSettings
from dcmdp_jax.data import arithmetic, chat
from dcmdp_jax.data.mixtures import Part, PromptStream, parse_mixture, split_locations
from dcmdp_jax.data.problems import check_location, load_problems
from dcmdp_jax.data.prompts import EncodedPrompts, encode_prompts, join_prompts
from dcmdp_jax.data.tokenizer import end_token_ids, fix_date, load_tokenizer
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.environments.turns import answer_text
from dcmdp_jax.errors import UserError, naming, shorten
from dcmdp_jax.evaluation.held_out import HeldOut, HeldOutTask, held_out_tasks
from dcmdp_jax.models import families, hf_config, hf_hub, hf_manifest, hf_weights
from dcmdp_jax.models.config import RECURRENT_SIZES, Lora, ModelConfig
from dcmdp_jax.models.lora import Adapter, read_adapter, trained
from dcmdp_jax.rewards.protocol import MATH, NEED_ANSWERS, Problem, Reward, RewardError
from dcmdp_jax.rewards.scoring import check_rewards, column_names
from dcmdp_jax.user_files import is_missing

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What the policy is trained or evaluated on.

    Attributes:
        config: the settings.
        model: the model's shape.
        directory: the directory of `model.path`; None for a fresh model.
        tokenizer: with a chat template and an end token.
        stop_token_ids: the ids that end a completion.
        held_out: the tasks to evaluate on, each with its encoded problems; empty without
            evaluation.
        rewards: the rewards of a completion, with their weights.
        columns: names of the data's columns that reward functions and the environment get.
        longest_prompt: maximum number of tokens of a prompt.
        train, stream: the encoded problems to train on and the order they are asked in; none in an
            evaluation.
        worked_solutions: conversations of the warm-up; None without one.
        adapter: the adapters of `model.adapter`; None without.
        lora: shape of the adapters that are trained; None trains all parameters.
        teacher: shape of the model of the reward `teacher:MODEL`; None without, or where a server
            has it.
        started: when the run was first started, whose date the chat template writes; None in an
            evaluation.
    """

    config: Config
    model: ModelConfig
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    held_out: HeldOut
    rewards: tuple[Reward, ...]
    columns: tuple[str, ...]
    longest_prompt: int
    directory: Path | None = None
    train: EncodedPrompts = EncodedPrompts(problems=[], token_ids=[])
    stream: PromptStream = PromptStream(())
    worked_solutions: EncodedPrompts | None = None
    adapter: Adapter | None = None
    lora: Lora | None = None
    teacher: ModelConfig | None = None
    started: datetime | None = None

    @property
    def sampling(self) -> SamplingParams:
        """The distribution that training samples from."""
        return sampling(self.config.rollout, self.stop_token_ids)

    def evaluation_sampling(self, task: HeldOutTask) -> SamplingParams:
        """The distribution that the completions of a held-out task are sampled from."""
        return dataclasses.replace(
            self.sampling,
            group_size=task.samples,
            temperature=self.config.evaluation.temperature,
        )

    @property
    def first_calls(self) -> list[tuple[list[np.ndarray], SamplingParams]]:
        """Prompts and distribution of the engine's first calls: held-out tasks, and a step."""
        training = self.config.training
        calls = [
            (prompts.token_ids, self.evaluation_sampling(task)) for task, prompts in self.held_out
        ]
        if self.train.problems:
            rows = self.stream.at(seed=training.seed, first=0, count=training.prompts_per_step)
            calls.append((self.train.select(rows).token_ids, self.sampling))
        return calls

    @property
    def shortest_sequence(self) -> int:
        """Tokens of the shortest sequence to train on: a prompt and one more, or a conversation."""
        shortest = min(map(len, self.train.token_ids))
        if self.train.targets:
            return shortest
        return shortest + 1

    @property
    def requests(self) -> tuple[list[int], int]:
        """Length of each prompt, and the most completions sampled in one call of the engine."""
        lengths = [len(ids) for ids in self.train.token_ids]
        for _, prompts in self.held_out:
            lengths += map(len, prompts.token_ids)
        completions = [len(prompts) * call.group_size for prompts, call in self.first_calls]
        return lengths, max(completions, default=0)


def read_task(config: Config, started: datetime) -> Task:
    """Read and check the files of a run; reward functions and the environment are called.

    No device starts.

    Args:
        config: the settings.
        started: see `Task`.

    Raises:
        UserError: in one line naming setting or file, value and remedy.
        OSError: for directories and files that can't be read.
    """
    settings = config.model
    if not config.supervised:
        missing = [reward for reward in _judged(config.rewards) if is_missing(reward.function)]
        _import_rewards(config.rewards, missing)
    # A model may be fetched and converted for minutes.
    with naming("config.task.train"):
        mixture = parse_mixture(config.task.train)
        for task in mixture:
            check_location(task.location)
    files = "tokenizer and data"
    if settings.path:
        files = f"model files, {files}"
    with activity(f"reading {files}"):
        directory = model_directory(settings)
        model, tokenizer = read_model(config, directory)
        fix_date(tokenizer, started)
        adapter = None
        lora = settings.lora
        if settings.adapter:
            adapter = _adapter(settings, model)
            if directory is not None and not config.warmup.steps:
                _check_base(settings, adapter, directory, model)
            lora = adapter.lora
        # Raises if the rank does not fit a layer.
        with as_settings(LORA):
            trained(model, lora)
        stop_token_ids = end_token_ids(tokenizer, directory, vocab_size=model.vocab_size)
        tools = read_tools(config, tokenizer)
        load = functools.partial(
            _load_prompts,
            config,
            tokenizer,
            tools,
            stop_token_ids=stop_token_ids,
        )

        train, stream = _train_prompts(mixture, load)
        evaluated_tasks = ()
        if config.evaluation.every_steps:
            evaluated_tasks = held_out(config, tokenizer, tools, stop_token_ids)
        rewards = columns = ()
        if not config.supervised:
            problems = [*train.problems]
            for _, prompts in evaluated_tasks:
                problems += prompts.problems
            rewards, columns = checked_rewards(config, problems, tokenizer)
        worked_solutions = None
        if config.warmup.steps:
            solutions = []
            for location in split_locations(config.warmup.task):
                solutions.append(load("warmup.task", location))
            worked_solutions = join_prompts(solutions)
        return Task(
            config=config,
            model=model,
            directory=directory,
            tokenizer=tokenizer,
            stop_token_ids=stop_token_ids,
            held_out=evaluated_tasks,
            rewards=rewards,
            columns=columns,
            longest_prompt=config.task.max_prompt_tokens,
            train=train,
            stream=stream,
            worked_solutions=worked_solutions,
            adapter=adapter,
            lora=lora,
            teacher=_teacher(config, model, tokenizer, stop_token_ids),
            started=started,
        )


def model_directory(settings: ModelSettings) -> Path | None:
    """The directory of `model.path`, fetched if it names a model elsewhere; None without a path."""
    if not settings.path:
        return None
    with naming("config.model.path"):
        return hf_hub.model_directory(settings.path)


def read_model(
    config: Config, directory: Path | None
) -> tuple[ModelConfig, PreTrainedTokenizerBase]:
    """The shape of the model, checked against the settings, and its tokenizer.

    Args:
        config: the settings.
        directory: result of `model_directory`.
    """
    settings = config.model
    if directory is not None:
        model = hf_config.read_model_config(directory)
        hf_manifest.check_manifest(directory, model)
        tokenizer = _tokenizer(settings, directory, model.vocab_size)
    else:
        tokenizer = _tokenizer(settings, None, None)
        model = fresh_model(settings.architecture, tokenizer, longest=config.max_total_tokens)
    check_model(config, model)
    return model, tokenizer


def check_model(config: Config, model: ModelConfig) -> None:
    """Refuse settings that are too large for the model, or of experts that it has not."""
    rollout = config.rollout
    top_logprobs = rollout.top_logprobs
    if top_logprobs > model.vocab_size:
        raise UserError(
            f"config.rollout.top_logprobs: got {top_logprobs}, must be at most "
            f"{model.vocab_size}, the whole vocabulary"
        )
    if config.max_total_tokens > model.max_position_embeddings:
        raise UserError(
            f"config.rollout.max_completion_tokens: {rollout.max_completion_tokens} and "
            f"task.max_prompt_tokens={config.task.max_prompt_tokens} make "
            f"{config.max_total_tokens}, the model has "
            f"max_position_embeddings={model.max_position_embeddings}"
        )
    router_settings = {
        "algorithm.router_aux_loss": config.algorithm.router_aux_loss,
        "rollout.router_replay": rollout.router_replay,
    }
    for name, value in router_settings.items():
        if value and not model.num_experts:
            raise UserError(
                f"config.{name}: got {value}, the model is a {model.model_type}, which has no "
                "experts"
            )


def sampling(rollout: RolloutSettings, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """The distribution that training samples from."""
    return SamplingParams(
        group_size=rollout.group_size,
        max_completion_tokens=rollout.max_completion_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=stop_token_ids,
    )


def _tokenizer(
    settings: ModelSettings, directory: Path | None, vocab_size: int | None
) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer`, else of `model.path`, else the built-in one."""
    if settings.tokenizer:
        with naming("config.model.tokenizer"):
            return load_tokenizer(settings.tokenizer, vocab_size=vocab_size)
    if directory is None:
        return arithmetic.build_tokenizer()
    try:
        return load_tokenizer(str(directory), vocab_size=vocab_size)
    except UserError as error:
        hint = "model.tokenizer may name another"
        raise UserError(f"config.model.path: {error}; {hint}") from error


def _adapter(settings: ModelSettings, model: ModelConfig) -> Adapter:
    """The adapters of `model.adapter`."""
    try:
        with naming("config.model.adapter"):
            adapter = read_adapter(Path(settings.adapter), model)
    except FileNotFoundError as error:
        raise UserError(
            f"config.model.adapter: {error}; give a directory that PEFT or `dcmdp convert export "
            "--adapter` wrote"
        ) from error
    if settings.lora_rank not in (0, adapter.lora.rank):
        raise UserError(
            f"config.model.lora_rank: got {settings.lora_rank}, the adapters of model.adapter "
            f"have rank {adapter.lora.rank}; set 0"
        )
    return adapter


def _check_base(settings: ModelSettings, adapter: Adapter, base: Path, model: ModelConfig) -> None:
    """Refuse another base than the adapters', without a look at all values: the start takes it."""
    if adapter.base_digest is None:
        return
    if adapter.base_digest != hf_weights.directory_digest(base, model):
        raise other_base(settings.adapter, base)


def _teacher(
    config: Config,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: tuple[int, ...],
) -> ModelConfig | None:
    """The shape of the teacher, which must know each token and place that the policy does."""
    if not config.loads_teacher:
        return None
    name = config.teacher[0]
    with naming("config.rewards.functions"):
        directory = hf_hub.model_directory(name)
        shape = hf_config.read_model_config(directory)
        teacher_tokenizer = load_tokenizer(str(directory))
        _check_vocabulary(name, teacher_tokenizer, tokenizer)
        if shape.vocab_size < model.vocab_size:
            raise UserError(
                f"the teacher {name} has an embedding of {shape.vocab_size} rows, the policy "
                f"samples from {model.vocab_size}; take a teacher with as many rows"
            )
        if shape.max_position_embeddings < config.max_total_tokens:
            raise UserError(f"the teacher {name} reads fewer tokens than {config.max_total_tokens}")
        end_ids = end_token_ids(teacher_tokenizer, directory, vocab_size=shape.vocab_size)

    unknown = [token for token in end_ids if token not in stop_token_ids]
    if unknown:
        remedy = "choose a teacher that ends as the policy does"
        if config.model.path and max(unknown) < model.vocab_size:
            ids = [*stop_token_ids, *unknown]
            remedy = (
                f"set eos_token_id to {ids} in generation_config.json of model.path, or {remedy}"
            )
        _LOG.warning(
            "config.rewards.functions: the teacher %s ends with %s, at which a completion of the "
            "policy goes on (it ends with %s): the policy may learn to write up to "
            "rollout.max_completion_tokens; %s",
            name,
            _named(teacher_tokenizer, unknown),
            _named(tokenizer, stop_token_ids),
            remedy,
        )
    return shape


def _check_vocabulary(
    name: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase
) -> None:
    """Refuse a teacher that has not each token of the policy under its id; it may have more."""
    teacher_ids = teacher.get_vocab()
    ids = policy.get_vocab()
    for token in sorted(ids, key=ids.__getitem__):
        if teacher_ids.get(token) == ids[token]:
            continue
        teacher_token = "no token"
        for text, number in teacher_ids.items():
            if number == ids[token]:
                teacher_token = shorten(text)
                break
        raise UserError(
            f"the teacher {name} has another vocabulary: token {ids[token]} of the policy is "
            f"{shorten(token)}, the teacher has {teacher_token} there"
        )


def _named(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Tokens by text and id."""
    names = []
    for token in ids:
        names.append(f"{shorten(tokenizer.convert_ids_to_tokens(token))} ({token})")
    return ", ".join(names)


def other_base(adapter: str, base: Path) -> UserError:
    """The refusal of adapters that were trained on another base."""
    return UserError(
        f"config.model.adapter: {adapter} was trained on another base than {base}; give model.path "
        "that base"
    )


def fresh_model(
    shape: Architecture, tokenizer: PreTrainedTokenizerBase, *, longest: int
) -> ModelConfig:
    """The model of `model.architecture`, with the tokenizer's vocabulary.

    Sliding layers see a quarter of the longest row, so that small runs have windows as large ones.

    Args:
        shape: the settings.
        tokenizer: the policy's.
        longest: tokens of the longest prompt and completion together.
    """
    family = families.FAMILIES[shape.model_type]
    window = {"sliding_window": max(1, longest // 4)}
    sizes = {
        **dataclasses.asdict(shape),
        **hf_config.layer_pattern(window, family, shape.num_layers),
    }
    if family.full_attention_every:
        sizes |= dict.fromkeys(RECURRENT_SIZES, shape.head_dim)
        sizes["linear_num_key_heads"] = shape.num_kv_heads
        sizes["linear_num_value_heads"] = shape.num_heads
        sizes["linear_conv_kernel_dim"] = 4
    try:
        return ModelConfig(
            **sizes,
            vocab_size=len(tokenizer),
            max_position_embeddings=longest,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    except UserError as error:
        raise UserError(f"config.model.architecture.{error}") from None


def needs_columns(config: Config) -> bool:
    """Whether problems keep their rows' columns, for functions of users or an environment."""
    return bool(config.task.environment) or any(reward != MATH for reward in config.rewards.names)


def checked_rewards(
    config: Config, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> tuple[tuple[Reward, ...], tuple[str, ...]]:
    """The rewards, and the columns that functions get; calls them, and starts the environment."""
    rewards = _judged(config.rewards)
    columns = tuple(column_names(problems)) if needs_columns(config) else ()
    _import_rewards(config.rewards, rewards, columns)
    if config.task.environment and not config.task.tools:
        _check_environment(config, tokenizer, columns)
    return rewards, columns


def _judged(settings: RewardSettings) -> tuple[Reward, ...]:
    return tuple(Reward(name, weight) for name, weight in settings.judged)


def _import_rewards(
    settings: RewardSettings, rewards: Sequence[Reward], columns: Sequence[str] = ()
) -> None:
    """Import reward functions, and end their processes; see `check_rewards`."""
    try:
        with activity("importing the reward functions"):
            check_rewards(rewards, columns, memory_gib=settings.memory_limit)
    except RewardError as error:
        raise UserError(f"config.rewards.functions: {in_settings(str(error), REWARDS)}") from error


def read_tools(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The JSON schemas of `task.environment`, which is started, where it is tools; else none."""
    return _check_environment(config, tokenizer) if config.task.tools else []


def _check_environment(
    config: Config, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Start the environment as in training, and render an answer; the JSON schemas of its tools."""
    with naming("config.task.environment"):
        with (
            environment_pool(config, tokenizer, columns) as pool,
            activity("importing the environment"),
        ):
            tools = pool.check()
        role = "tool" if tools else "user"
        answer = {"role": role, "name": "unknown", "content": "1"}
        variables = chat.template_variables(config.task.chat_template_kwargs, tokenizer)
        answer_text(tokenizer, [answer], variables, tools)
    return tools


def environment_pool(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    columns: Sequence[str],
    output: Path | None = None,
) -> EnvironmentPool:
    """The process of `task.environment`, see `EnvironmentPool`."""
    task = config.task
    variables = chat.template_variables(task.chat_template_kwargs, tokenizer)
    tools = ()
    if task.tools:
        tools = chat.find_call_format(tokenizer, variables), task.max_result_characters
    return EnvironmentPool(
        task.environment,
        columns,
        timeout_s=config.rewards.timeout,
        memory_gib=config.rewards.memory_limit,
        output=output,
        tools=tools,
        workers=task.verifier_workers if tools else 1,
    )


def _train_prompts(
    mixture: Sequence[Part], load: Callable[..., EncodedPrompts]
) -> tuple[EncodedPrompts, PromptStream]:
    """The problems of `task.train`, a mixture's task by task, and their order."""
    encoded = []
    for task in mixture:
        name = task.name if len(mixture) > 1 else ""
        encoded.append(load("task.train", task.location, name))
    sizes = tuple(len(prompts.problems) for prompts in encoded)
    stream = PromptStream(sizes, tuple(task.weight for task in mixture))
    return join_prompts(encoded), stream


def _load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    setting: str,
    location: str,
    name: str = "",
    *,
    stop_token_ids: Sequence[int] = (),
) -> EncodedPrompts:
    """Problems of a location that a setting names, as token ids by the config.

    Rows without tools of their own get `tools`.

    Prompts are rewarded: they have answers if a reward needs them, each where no other reward is
    there. The warm-up's and those of a supervised run have completions to learn from.
    """
    need_answers = [reward in NEED_ANSWERS for reward in config.rewards.names]
    learned = setting == "warmup.task" or config.supervised
    if learned:
        answers = "learned"
    elif any(need_answers):
        answers = "required" if all(need_answers) else "optional"
    else:
        answers = "unused"

    task = config.task
    max_prompt_tokens = task.max_prompt_tokens
    if learned:
        max_prompt_tokens = config.max_total_tokens
    split = "train"
    limit = None
    if setting == "evaluation.task":
        split = "test"
        limit = config.evaluation.max_problems or None
    try:
        problems = []
        for problem in load_problems(
            location,
            split=split,
            limit=limit,
            on_bad_row=task.on_bad_row,
            keep_columns=not learned and needs_columns(config),
            answers=answers,
            name=name,
        ):
            problems.append(dataclasses.replace(problem, tools=problem.tools or tuple(tools)))
        return encode_prompts(
            problems,
            tokenizer,
            prompt_suffix=task.prompt_suffix,
            max_prompt_tokens=max_prompt_tokens,
            chat_template_kwargs=task.chat_template_kwargs,
            learned=learned,
            stop_token_ids=stop_token_ids,
        )
    except UserError as error:
        where = "task." if str(error).startswith("chat_template_kwargs:") else f"{setting}: "
        raise UserError(f"config.{where}{error}") from error


def held_out(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]] = (),
    stop_token_ids: Sequence[int] = (),
) -> HeldOut:
    """The tasks of `evaluation.task`, each with its encoded problems."""
    if not config.supervised and not config.rewards.judged:
        raise UserError(
            "config.rewards.functions: evaluation needs another reward than a teacher, of any "
            "weight"
        )
    evaluation = config.evaluation
    with as_settings(EVALUATION):
        tasks = held_out_tasks(evaluation.task, evaluation.samples)
    load = functools.partial(
        _load_prompts,
        config,
        tokenizer,
        tools,
        "evaluation.task",
        stop_token_ids=stop_token_ids,
    )
    return tuple((task, load(task.location)) for task in tasks)

"""A run: every part that a command needs, made and checked once, when it is first asked for.

`Run.check` asks in the order config, files, machine, so that bad input fails before expensive work.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.config.algorithm import check_own_remedies
from dcmdp_jax.config.arguments import HOSTS, LORA, MESH, as_settings, of_engine
from dcmdp_jax.config.engine import engine_arguments, find_trainable
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.mixtures import PromptStream
from dcmdp_jax.data.prompts import EncodedPrompts, end_token_ids, template_variables
from dcmdp_jax.data.row_layout import ANY_NUMBER, RowShapes, make_row_shapes
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind, Workload
from dcmdp_jax.engines.protocol import Engine, SamplingParams
from dcmdp_jax.environments.pool import EnvironmentPool
from dcmdp_jax.environments.turns import TurnLimits, TurnSampler
from dcmdp_jax.errors import UserError
from dcmdp_jax.evaluation.held_out import HeldOutTask
from dcmdp_jax.machine import Machine, MemoryPart
from dcmdp_jax.models import hf_weights
from dcmdp_jax.models.attention import choose_kernel
from dcmdp_jax.models.config import Lora, ModelConfig
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.hf_hub import model_directory
from dcmdp_jax.models.lora import SavedAdapters, adapter_declarations, load_base, trained
from dcmdp_jax.models.params import draw_params, init_params, logical_axes, num_params, param_shapes
from dcmdp_jax.models.peft_files import Adapter, base_checksum
from dcmdp_jax.models.row_logprobs import make_probe
from dcmdp_jax.observe.jsonl import rewards_log
from dcmdp_jax.observe.metrics_io import require_tracker
from dcmdp_jax.parallel.backend import prepare_jax
from dcmdp_jax.parallel.hosts import ONE_PROCESS, Hosts, join_hosts
from dcmdp_jax.parallel.mesh import check_training_mesh, connect_devices, row_shards, sampling_mesh, training_mesh
from dcmdp_jax.parallel.sharding import param_shardings, to_global
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.protocol import Reward
from dcmdp_jax.rewards.scoring import RewardScorer
from dcmdp_jax.run import files
from dcmdp_jax.run.directory import check_run_directory, fitted_rows
from dcmdp_jax.run.memory_use import MemoryUse, this_machine, training_memory, with_engine
from dcmdp_jax.run.model_checks import (
    check_experts,
    check_forward,
    check_kernel,
    check_lengths,
    check_platform,
    check_reductions,
    segments_of,
)
from dcmdp_jax.types import Params

_CPU_UNROLL = 8
"""Most layers that a CPU runs without a loop, in which gradients are copied. Deeper models gain no time by it: the 30
layers of SmolLM2-135M compile in 9 CPU seconds in place of 22, and take 1.9 GiB of temporary memory in place of 2.5."""


@contextlib.contextmanager
def joined_hosts(config: Config) -> Iterator[Hosts]:
    """Join the processes of a run, see `hosts.join_hosts`; errors name the settings."""
    with contextlib.ExitStack() as stack:
        with as_settings(HOSTS):
            hosts = stack.enter_context(join_hosts(**dataclasses.asdict(config.hosts)))
        yield hosts


class Run:
    """The parts of a run. Any part may be replaced by assignment before something is made from it.

    Args:
        config: the settings, as the user gave them.
        hosts: the processes of the run; each has a `Run`.
        lasting: closes the engine and the verifier, for runs that share them; None closes them with the run.
        parts: parts made before, such as the engine of a run that differs in its directory and seed alone.

    Raises:
        UserError: when a part is asked for, in one line naming setting or file, value and remedy.
        OSError: for directories and files that can't be read or written.
    """

    def __init__(
        self, config: Config, hosts: Hosts = ONE_PROCESS, *, lasting: contextlib.ExitStack | None = None, **parts: Any
    ) -> None:
        self.asked, self.hosts = config, hosts
        self._stack = contextlib.ExitStack()
        self._lasting = self._stack if lasting is None else lasting
        self.__dict__.update(parts)

    def check(self) -> Run:
        """Check all that can be checked without touching weights or compiling, the cheapest first."""
        self.fitted_rows, self.engine_platform  # noqa: B018 - a part is made when it is asked for
        with activity(f"reading {'model files, ' * bool(self.asked.model.path)}tokenizer and data"):
            self.model, self.lora, self.stop_token_ids, self.columns, self.worked_solutions  # noqa: B018
        self.config  # noqa: B018
        return self

    def start(self) -> None:
        """Start the engine, the verifier, the reward functions and the environment; no weights are loaded.

        Raises:
            UserError, EngineError, MemoryError: in one line, if the engine does not start.
        """
        self.engine, self.scorer, self.turns  # noqa: B018

    def close(self) -> None:
        """Close what was started, but for parts that were given."""
        self._stack.close()

    # The config.

    @cached_property
    def fitted_rows(self) -> int:
        """Rows that an earlier start fitted into memory, 0 without one; the directory and trackers are checked."""
        check_run_directory(self.asked)
        for kind in ("wandb", "trackio"):
            if project := getattr(self.asked.observe, f"{kind}_project"):
                require_tracker(kind, project)
        return fitted_rows(self.asked)

    @cached_property
    def config(self) -> Config:
        """The config of a run whose memory fits."""
        self.memory.check()
        return self.asked

    @cached_property
    def engine_kind(self) -> EngineKind:
        """The engine's record."""
        return find_trainable(self.asked.rollout.engine)

    @cached_property
    def engine_platform(self) -> str:
        """Where the engine computes; what it needs is installed."""
        kind, arguments = engine_arguments(self.asked, kind=self.engine_kind)
        with as_settings(of_engine(kind)):
            return kind.check_machine(arguments)

    @cached_property
    def sampling(self) -> SamplingParams:
        """The distribution training samples from."""
        rollout = self.asked.rollout
        return SamplingParams(
            group_size=rollout.group_size,
            max_completion_tokens=rollout.max_completion_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_token_ids=self.stop_token_ids,
        )

    # Its files.

    @cached_property
    def _saved_model(self) -> ModelConfig | None:
        return files.saved_model(self.asked)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a chat template and an end token."""
        saved = self._saved_model
        return files.tokenizer(self.asked, saved.vocab_size if saved else None)

    @cached_property
    def model(self) -> ModelConfig:
        """The model's shape, checked against the settings."""
        tokenizer = self.tokenizer
        model = self._saved_model or files.fresh_model(self.asked, tokenizer)
        check_lengths(self.asked, model)
        check_experts(self.asked, model)
        return model

    @cached_property
    def _adapter(self) -> Adapter | None:
        """The adapters of `model.adapter`; None without."""
        return files.adapter(self.asked, self.model) if self.asked.model.adapter else None

    @cached_property
    def lora(self) -> Lora | None:
        """Shape of the adapters that are trained; None where all parameters are."""
        lora = self._adapter.lora if self._adapter else self.asked.model.lora
        with as_settings(LORA):
            trained(self.model, lora)
        return lora

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a completion."""
        directory = files.path_of_model(self.asked) if self.asked.model.path else None
        return end_token_ids(self.tokenizer, directory, vocab_size=self.model.vocab_size)

    @cached_property
    def rewards(self) -> tuple[Reward, ...]:
        """The rewards of a completion, with their weights."""
        return tuple(Reward(*each) for each in self.asked.rewards.weighted)

    @cached_property
    def _train(self) -> tuple[EncodedPrompts, PromptStream]:
        return files.train_prompts(self.asked, self.tokenizer)

    @property
    def train(self) -> EncodedPrompts:
        """The encoded problems to train on."""
        return self._train[0]

    @property
    def stream(self) -> PromptStream:
        """The order in which training problems are asked."""
        return self._train[1]

    @cached_property
    def held_out(self) -> tuple[tuple[HeldOutTask, EncodedPrompts], ...]:
        """The tasks to evaluate on, each with its encoded problems; empty without evaluation."""
        return files.held_out(self.asked, self.tokenizer) if self.asked.evaluation.every_steps else ()

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the data's columns that reward functions get; the functions and the environment are checked."""
        asked = [self.train, *(prompts for _, prompts in self.held_out)]
        problems = [problem for prompts in asked for problem in prompts.problems]
        return files.checked_columns(self.asked, self.rewards, problems, self.tokenizer)

    @cached_property
    def worked_solutions(self) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """Prompts and solutions of the warm-up, token ids; None without one."""
        return files.worked_solutions(self.asked, self.tokenizer) if self.asked.warmup.steps else None

    @property
    def longest_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.asked.task.max_prompt_tokens

    @cached_property
    def shortest_prompt(self) -> int:
        """Least tokens of a prompt to train on."""
        return min(map(len, self.train.token_ids))

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt, to train on and to evaluate on."""
        return [len(ids) for prompts in (self.train, *(one for _, one in self.held_out)) for ids in prompts.token_ids]

    @cached_property
    def completions(self) -> int:
        """Most completions sampled in one call of the engine."""
        evaluated = [len(prompts.problems) * task.samples for task, prompts in self.held_out]
        return max(self.asked.training.prompts_per_step * self.asked.rollout.group_size, *evaluated, 0)

    # The machine.

    @cached_property
    def engine_asked(self) -> EngineArguments:
        """The engine's arguments but for the rows that fit."""
        known = {"kind": self.engine_kind, "model": self.model, "platform": self.engine_platform}
        return engine_arguments(self.asked, **known, **self.engine_place())[1]

    def engine_place(self) -> dict[str, Any]:
        """Arguments of an engine beside a trainer."""
        return {
            "host": self.hosts.index,
            "mesh": lambda **split: sampling_mesh(self.mesh, num_params=num_params(self.model), **split),
            "probe": lambda: make_probe(self.model, self.compute, self.mesh),
            "prepare": True,
        }

    @cached_property
    def mesh(self) -> Mesh:
        """The devices, which start here; the settings are checked against them and the model."""
        with as_settings(of_engine(self.engine_kind)):
            self.engine_kind.check(self.engine_asked)
        prepare_jax(self.asked.mesh.cpu_devices)
        mesh = self.checked_mesh()
        if self.hosts.count > 1:
            connect_devices(mesh)
        return mesh

    def checked_mesh(self) -> Mesh:
        """The training devices."""
        config, model = self.asked, self.model
        platform = jax.devices()[0].platform
        check_platform(platform)
        check_kernel(config, platform, model.head_dim)
        check_forward(config, self.engine_asked, platform)
        sizes = config.mesh.data, config.mesh.fsdp, config.mesh.tensor, config.mesh.expert
        with as_settings(MESH):
            mesh = training_mesh(*sizes, num_params=num_params(model))
            check_training_mesh(
                mesh,
                num_heads=model.num_heads,
                num_experts=model.num_experts,
                completions=config.completions_per_mini_batch,
            )
        check_reductions(config, mesh)
        check_own_remedies(config.algorithm)
        return mesh

    @cached_property
    def compute(self) -> Compute:
        """How the training stack computes, its attention kernel the one of this mesh."""
        return compute_on(self.asked, self.mesh, layers=self.model.num_layers)

    @cached_property
    def packing(self) -> RowShapes:
        """Shapes of a batch, of prompts as long as those to train on."""
        return packing_on(self.asked, self.mesh, self.compute, shortest=1 + self.shortest_prompt)

    @cached_property
    def machine(self) -> Machine:
        """The machine that this process runs on."""
        return this_machine(self.mesh.devices.flat[0].platform)

    @cached_property
    def memory(self) -> MemoryUse:
        """Memory that the run takes, and memory that there is; `config` and `engine` refuse what does not fit."""
        asked = self.engine_kind, self.engine_asked, self.workload, self.machine
        return with_engine(*asked, self.own_memory(), fitted_rows=self.fitted_rows)

    @cached_property
    def workload(self) -> Workload:
        """Requests to the engine."""
        rollout, model = self.asked.rollout, self.asked.model
        dtype = "float32" if model.lora_rank or model.adapter else model.param_dtype
        lengths = self.prompt_lengths
        return Workload(self.completions, rollout.group_size, lengths, rollout.max_completion_tokens, dtype)

    def own_memory(self) -> list[MemoryPart]:
        """The parts of the trainer."""
        parts = self.asked, self.model, self.compute, self.mesh, self.packing, self.machine
        return training_memory(*parts, completions=self.completions, lora=self.lora)

    @cached_property
    def engine_arguments(self) -> EngineArguments:
        """All that the engine may want to know."""
        return dataclasses.replace(self.engine_asked, max_rows=self.memory.rows)

    @property
    def samples_beside(self) -> bool:
        """Whether the engine samples while the trainer trains: in a process of its own.

        On several hosts in one call a step: whether there is another is for all of them to say, at a meeting.
        """
        refills = self.asked.algorithm.refill_rounds > 0 and self.hosts.count > 1
        return self.engine_kind.own_process and not refills

    @property
    def rewards_output(self) -> Path | None:
        """File that gets what reward functions and environments print; None discards it."""
        return Path(self.asked.run_dir) / rewards_log(self.hosts.index)

    # What is started.

    @cached_property
    def engine(self) -> Engine:
        """The inference engine of `rollout.engine`, ready for weights."""
        self.memory.check()
        arguments = self.engine_arguments
        with activity(f"starting the engine {self.asked.rollout.engine}"), as_settings(of_engine(self.engine_kind)):
            engine = self.engine_kind.start(arguments)
        self._lasting.callback(engine.close)
        return engine

    @cached_property
    def verifier(self) -> Verifier:
        """The judge of answers, for the reward `math` and for evaluation."""
        task = self.asked.task
        limits = task.verifier_workers, task.verifier_timeout, task.verifier_budget
        return self._lasting.enter_context(Verifier(*limits, self.asked.rewards.answer_extraction))

    @cached_property
    def scorer(self) -> RewardScorer:
        """The scorer of completions, with its reward functions."""
        settings = self.asked.rewards
        scorer = RewardScorer(
            self.rewards,
            self.verifier,
            self.columns,
            by_source=len({problem.source for problem in self.train.problems}) > 1,
            output=self.rewards_output,
            timeout_s=settings.timeout,
            memory_gib=settings.memory_limit,
            stop_on_error=settings.on_error == "error",
        )
        self._stack.callback(scorer.close)
        return scorer

    @cached_property
    def turns(self) -> TurnSampler | None:
        """The sampler of turns with the environment of `task.environment`; None without one."""
        task, rewards = self.asked.task, self.asked.rewards
        if not task.environment:
            return None
        pool = EnvironmentPool(
            task.environment,
            self.columns,
            timeout_s=rewards.timeout,
            memory_gib=rewards.memory_limit,
            output=self.rewards_output,
        )
        self._stack.callback(pool.close)
        return TurnSampler(
            self.engine,
            pool,
            self.tokenizer,
            self.columns,
            TurnLimits(task.max_turns, self.asked.turn_tokens, self.longest_prompt),
            prompt_suffix=task.prompt_suffix,
            variables=template_variables(task.chat_template_kwargs, self.tokenizer),
            stop_on_error=rewards.on_error == "error",
        )

    @cached_property
    def shardings(self) -> Params:
        """The sharding of every parameter of the model."""
        shapes = param_shapes(self.model, self.asked.model.param_dtype)
        return param_shardings(logical_axes(self.model), shapes, self.mesh)

    def initial_params(self) -> Params:
        """The starting parameters on the mesh, read from `model.path` or made from the seed."""
        if self.asked.model.path:
            return self.load_params(model_directory(self.asked.model.path))
        key = jax.random.key(self.asked.training.seed)
        draw = jax.jit(lambda: init_params(self.model, key, self.asked.model.param_dtype), out_shardings=self.shardings)
        return draw()

    def load_params(self, directory: Path) -> Params:
        """Parameters of the run's model from a Hugging Face directory, on the mesh."""
        dtype = self.asked.model.param_dtype
        return hf_weights.load_params(directory, self.model, dtype=dtype, shardings=self.shardings)

    @property
    def reference(self) -> Path:
        """The directory of the run's initial policy, where it is not that of `model.path`."""
        return Path(self.asked.run_dir) / "reference"

    @property
    def base_path(self) -> Path | None:
        """The directory of `model.path` where the adapters' base is that; None where the run made its base."""
        path = self.asked.model.path
        return model_directory(path) if path and not self.asked.warmup.steps else None

    @property
    def saved_adapters(self) -> SavedAdapters | None:
        """Record of the adapters for a checkpoint; None without."""
        if self.lora is None:
            return None
        path = self.base_path or self.reference
        return SavedAdapters(*dataclasses.astuple(self.lora), self.asked.model.lora_base, str(path.resolve()))

    def load_base(self, directory: Path) -> Params:
        """The frozen parameters that adapters are added to, on the mesh."""
        return load_base(directory, self.model, self.asked.model.lora_base, self.shardings)

    def initial_adapters(self, shardings: Params) -> Params:
        """The starting adapters, read from `model.adapter` or drawn from the seed."""
        if self._adapter:
            base, recorded = self.base_path or self.reference, self._adapter.base_checksum
            if recorded is not None and recorded != base_checksum(
                load_base(base, self.model, "bfloat16", self.shardings)
            ):
                raise files.other_base(self.asked, base)
            return to_global(self._adapter.params, shardings)
        declared, key = adapter_declarations(self.model, self.lora), jax.random.key(self.asked.training.seed)
        draw = jax.jit(lambda: draw_params(declared, key, self.asked.model.param_dtype), out_shardings=shardings)
        return draw()


def compute_on(config: Config, mesh: Mesh, *, layers: int = _CPU_UNROLL) -> Compute:
    """Computation of the training stack on a mesh, of a model with `layers` layers."""
    platform = mesh.devices.flat[0].platform
    dtype = np.dtype(jnp.dtype(config.model.compute_dtype))
    longest = -(-max((config.max_total_tokens, *config.training.row_lengths)) // 128) * 128
    kernel = choose_kernel(config.model.attention, dtype, platform, longest)
    return Compute(
        dtype=config.model.compute_dtype,
        remat=config.model.remat,
        scan_unroll=config.model.scan_unroll or (_CPU_UNROLL if platform == "cpu" and layers <= _CPU_UNROLL else 1),
        attention=kernel,
        logprob_chunk=config.model.logprob_chunk,
        one_segment=segments_of(config, kernel) == 1,
        segments=segments_of(config, kernel),
    )


def packing_on(config: Config, mesh: Mesh, compute: Compute, shortest: int = 1) -> RowShapes:
    """Shapes of a batch of sequences of at least `shortest` tokens, for a computation on a mesh."""
    splash, row_lengths = compute.attention == "splash", config.training.row_lengths
    if splash and (odd := [length for length in row_lengths if length % 128]):
        raise UserError(f"config.training.row_lengths: got {odd[0]}, splash attention needs multiples of 128")
    return make_row_shapes(
        row_lengths=row_lengths,
        longest=config.max_total_tokens,
        shortest=shortest,
        length_multiple=512 if splash else 8,
        micro_batch_tokens=config.training.micro_batch_tokens,
        mini_batches=config.mini_batches,
        completions=config.completions_per_mini_batch,
        segments_per_row=segments_of(config, compute.attention) or ANY_NUMBER,
        row_shards=row_shards(mesh),
    )

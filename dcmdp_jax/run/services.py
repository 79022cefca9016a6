"""What a run starts: the inference engine, the judges of completions, the sampler of turns."""

import contextlib
import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.config.checks import as_settings, of_engine
from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.chat import template_variables
from dcmdp_jax.engines import protocol, registry
from dcmdp_jax.environments.turns import TurnRules, TurnSampler
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.scoring import RewardScorer
from dcmdp_jax.run.memory_use import EngineSetup
from dcmdp_jax.run.task import Task, environment_pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Services(contextlib.AbstractContextManager["Services"]):
    """What samples and scores, started; a context manager that closes it.

    Attributes:
        engine: the inference engine, ready for weights.
        scorer: scores completions, with the judge of answers and the reward functions.
        turns: samples in turns with the environment of `task.environment`; None without one.
        teacher: the server of the reward `teacher:http://...`; None without.
        tokenizer: turns token ids into the texts that are scored.
        closing: closes all of them.
    """

    engine: protocol.Engine
    scorer: RewardScorer
    turns: TurnSampler | None
    tokenizer: PreTrainedTokenizerBase
    closing: contextlib.ExitStack
    teacher: protocol.Engine | None = None

    def __exit__(self, *_: object) -> None:
        self.closing.close()


def start_services(task: Task, setup: EngineSetup, *, output: Path | None = None) -> Services:
    """Start engine, verifier, reward functions and environment; no weights are loaded.

    Args:
        task: rewards, data columns, tokenizer.
        setup: the engine, and the memory that it is started in.
        output: file that gets what reward functions and environments print; None discards it.

    Raises:
        UserError, EngineError, MemoryError: in one line, if the engine does not start.
    """
    config = task.config
    task_settings = config.task
    rewards = config.rewards
    stop_on_error = rewards.on_error == "error"
    with contextlib.ExitStack() as stack:
        setup.memory.check()
        with (
            activity(f"starting the engine {config.rollout.engine}"),
            as_settings(of_engine(setup.kind)),
        ):
            engine = setup.kind.start(setup.arguments)
        stack.callback(engine.close)
        verifier = Verifier(
            task_settings.verifier_workers,
            task_settings.verifier_timeout,
            task_settings.verifier_budget,
            extraction=rewards.answer_extraction,
        )
        stack.enter_context(verifier)
        scorer = RewardScorer(
            task.rewards,
            verifier,
            task.columns,
            by_source=len({problem.source for problem in task.train.problems}) > 1,
            timeout_s=rewards.timeout,
            memory_gib=rewards.memory_limit,
            stop_on_error=stop_on_error,
            output=output,
        )
        stack.callback(scorer.close)

        turns = None
        if task_settings.environment:
            pool = environment_pool(config, task.tokenizer, task.columns, output)
            turns = TurnSampler(
                engine=engine,
                pool=stack.enter_context(pool),
                tokenizer=task.tokenizer,
                rules=TurnRules(
                    columns=task.columns,
                    turns=task_settings.max_turns,
                    turn_tokens=config.turn_tokens,
                    prompt_tokens=task.longest_prompt,
                    prompt_suffix=task_settings.prompt_suffix,
                    variables=template_variables(
                        task_settings.chat_template_kwargs, task.tokenizer
                    ),
                    stop_on_error=stop_on_error,
                ),
            )
        teacher = None
        if config.teacher[0] and not config.loads_teacher:
            teacher = _teacher_server(config, setup)
        return Services(
            engine=engine,
            scorer=scorer,
            turns=turns,
            tokenizer=task.tokenizer,
            teacher=teacher,
            closing=stack.pop_all(),
        )


def _teacher_server(config: Config, setup: EngineSetup) -> protocol.Engine:
    """The server of the reward `teacher:http://...`."""
    kind = registry.find_engine("http")
    with as_settings(dict.fromkeys(("server", "max_total_tokens"), "rewards.functions")):
        arguments = dataclasses.replace(
            setup.arguments,
            settings=kind.settings(config.teacher[0]),
            max_total_tokens=config.max_total_tokens + 1,  # scoring takes one token more
        )
        return kind.build(arguments)

"""What a run starts: the inference engine, the judges of completions, the sampler of turns."""

import contextlib
import dataclasses
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dcmdp_jax.activity import activity
from dcmdp_jax.config.checks import as_settings, of_engine
from dcmdp_jax.data.chat import template_variables
from dcmdp_jax.engines import protocol, registry
from dcmdp_jax.environments.turns import TurnSampler
from dcmdp_jax.rewards.math.verifier import Verifier
from dcmdp_jax.rewards.scoring import RewardScorer
from dcmdp_jax.run.memory_use import EngineSetup
from dcmdp_jax.run.task import Task, environment_pool


@dataclasses.dataclass(frozen=True)
class Services(contextlib.AbstractContextManager["Services"]):
    """What samples and scores, started; a context manager that closes it.

    Attributes:
        engine: the inference engine, ready for weights. Nothing is started for a supervised run:
            all are None.
        verifier: the judge of answers, for the reward `math` and for evaluation.
        scorer: scores completions, with the reward functions.
        turns: samples in turns with the environment of `task.environment`; None without one.
        teacher: the server of the reward `teacher:http://...`; None without.
        tokenizer: turns token ids into the texts that are scored.
        closing: closes all of them.
    """

    engine: protocol.Engine
    verifier: Verifier
    scorer: RewardScorer
    turns: TurnSampler | None
    tokenizer: PreTrainedTokenizerBase
    closing: contextlib.ExitStack
    teacher: protocol.Engine | None = None

    def __exit__(self, *_: object) -> None:
        self.closing.close()


def start_services(task: Task, setup: EngineSetup, *, output: Path | None = None) -> Services:
    """Start the engine, the verifier, the reward functions and the environment; no weights are
    loaded.

    Args:
        task: rewards, data columns, tokenizer.
        setup: the engine, and the memory that it is started in.
        output: file that gets what reward functions and environments print; None discards it.

    Raises:
        UserError, EngineError, MemoryError: in one line, if the engine does not start.
    """
    config = task.config
    limits = task.config.rewards
    known = {"timeout_s": limits.timeout, "memory_gib": limits.memory_limit, "output": output}
    stop_on_error = config.rewards.on_error == "error"
    with contextlib.ExitStack() as stack:
        setup.memory.check()
        if config.supervised:
            return Services(None, None, None, None, task.tokenizer, stack.pop_all())
        with (
            activity(f"starting the engine {config.rollout.engine}"),
            as_settings(of_engine(setup.kind)),
        ):
            engine = setup.kind.start(setup.arguments)
        stack.callback(engine.close)
        judged = (
            config.task.verifier_workers,
            config.task.verifier_timeout,
            config.task.verifier_budget,
        )
        verifier = stack.enter_context(Verifier(*judged, config.rewards.answer_extraction))
        by_source = len({problem.source for problem in task.train.problems}) > 1
        scorer = RewardScorer(
            task.rewards,
            verifier,
            task.columns,
            by_source=by_source,
            stop_on_error=stop_on_error,
            **known,
        )
        stack.callback(scorer.close)
        turns = None
        if config.task.environment:
            pool = stack.enter_context(
                environment_pool(config, task.tokenizer, task.columns, output)
            )
            lengths = config.task.max_turns, config.turn_tokens, task.longest_prompt
            variables = template_variables(config.task.chat_template_kwargs, task.tokenizer)
            chat = task.tokenizer, task.columns, *lengths, config.task.prompt_suffix, variables
            turns = TurnSampler(engine, pool, *chat, stop_on_error)
        teacher, (server, _) = None, config.teacher
        if server and not config.loads_teacher:
            kind = registry.find_engine("http")
            with as_settings(dict.fromkeys(("server", "max_total_tokens"), "rewards.functions")):
                asked = {
                    "settings": kind.settings(server),
                    "max_total_tokens": config.max_total_tokens + 1,
                }
                teacher = kind.build(
                    dataclasses.replace(setup.arguments, **asked)
                )  # scoring takes one token more
        return Services(engine, verifier, scorer, turns, task.tokenizer, stack.pop_all(), teacher)

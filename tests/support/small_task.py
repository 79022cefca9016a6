"""Task, services and placement of a few problems, for parts of training that are tested without a
run.
"""

import contextlib
import dataclasses
from types import SimpleNamespace

import jax
import numpy as np

from dcmdp_jax.config.settings import Config
from dcmdp_jax.data.episode import single_turn
from dcmdp_jax.data.mixtures import PromptStream
from dcmdp_jax.data.prompts import EncodedPrompts
from dcmdp_jax.data.row_layout import RowShapes
from dcmdp_jax.models.decoder import Compute
from dcmdp_jax.models.scheme import FULL
from dcmdp_jax.parallel.hosts import ONE_PROCESS
from dcmdp_jax.parallel.mesh import make_mesh
from dcmdp_jax.rewards.protocol import Problem
from dcmdp_jax.rewards.scoring import BatchScores
from dcmdp_jax.run.placement import Placement
from dcmdp_jax.run.services import Services
from dcmdp_jax.run.task import Task

GROUP = 2


def small_config(**sections):
    """The defaults with settings of sections changed: `training={"seed": 5}`."""
    changed = {
        name: dataclasses.replace(getattr(Config(), name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(Config(), **changed)


def small_task(problems=8, *, group=GROUP, **sections):
    """Problem i has the token i as its prompt, and the answer i."""
    config = small_config(**sections)
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, group_size=group)
    )
    ids = [np.array([number], np.int32) for number in range(problems)]
    train = EncodedPrompts(
        problems=[Problem(str(i), str(i), "s", i) for i in range(problems)], token_ids=ids
    )
    return Task(
        config=config,
        model=None,
        tokenizer=None,
        stop_token_ids=(),
        held_out=(),
        rewards=(),
        columns=(),
        longest_prompt=1,
        train=train,
        stream=PromptStream((problems,)),
    )


def small_services(engine):
    return Services(
        engine=engine,
        scorer=None,
        turns=None,
        tokenizer=None,
        closing=contextlib.ExitStack(),
    )


def small_placement(*, hosts=ONE_PROCESS, completions=4, length=4, samples_while_training=False):
    """One device; a mini-batch of rows of one completion."""
    packing = RowShapes(
        row_lengths=(length,),
        rows_per_micro_batch=(completions,),
        micro_batches=(1,),
        mini_batches=1,
        completions=completions,
        segments_per_row=1,
        row_shards=1,
        longest=length,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    return Placement(
        hosts=hosts,
        mesh=mesh,
        compute=Compute(),
        scheme=FULL,
        packing=packing,
        columns={},
        frozen=None,
        engine=None,
        samples_while_training=samples_while_training,
    )


class EchoEngine:
    """Samples the problem's number as the only token of each completion, and -0.1 times the member
    as its log-prob.

    Scoring, and sampling one completion alone, give log-probs that are lower by the two shifts.
    """

    def __init__(self, *, scored=0.0, alone=0.0):
        self.calls = []
        self.version = -1
        self._scored = scored
        self._alone = alone

    def sync_weights(self, params, version):
        self.version = version
        return {}

    def release_weights(self):
        pass

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        self.calls.append((len(prompts), seed, step))
        shift = self._alone if sampling.group_size == 1 else 0.0
        for group, prompt in enumerate(prompts):
            place = dict(policy_version=max(self.version, 0), group=group, finish_reason="stop")
            members = (
                range(sampling.group_size) if sampling.group_size > 1 else [first_prompt % GROUP]
            )
            yield [
                single_turn(
                    prompt,
                    prompt,
                    np.array([-0.1 * number - shift], np.float32),
                    member=place_,
                    **place,
                )
                for place_, number in enumerate(members)
            ]

    def score(self, prompts, completions, *, temperature):
        assert temperature == 1.0
        return [
            np.array([-0.1 * (row % GROUP) - self._scored], np.float32)
            for row in range(len(prompts))
        ]


class ParityScoring:
    """In place of `BatchScoring`: members of even problems get rewards 0 and 1, those of odd ones
    both 1.
    """

    def __init__(self, scorer, tokenizer, problems, state):
        self._problems = [int(problem.answer) for problem in problems]

    def begin(self, rows, completion_ids):
        pass

    def finish(self, on_wait):
        totals = [
            1.0 if problem % 2 else float(place % GROUP)
            for place, problem in enumerate(self._problems)
        ]
        totals = np.array(totals, np.float32)
        texts = [str(problem) for problem in self._problems]
        return texts, BatchScores(totals=totals, values={"math": totals}, failed={}, grades=None)


def small_session(task, placement, programs, leave):
    """What batches need of a session."""
    return SimpleNamespace(
        run=SimpleNamespace(task=task, placement=placement),
        programs=programs,
        exit=leave,
        frozen=None,
        wait_until_compiled=lambda: None,
    )

"""Run the real trainer against an engine with a planted fault, for alarm_watch_test.py.

One run for each fault.

    python -m tests.training.planted_alarms DIRECTORY

Makes DIRECTORY/FAULT, a run directory, for each of `FAULTS`. A run stops at its first alarm. The
console of each run goes to DIRECTORY/FAULT.log. The runs share one compiled step.
"""

import contextlib
import dataclasses
import logging
import sys
from pathlib import Path

import jax
import numpy as np

from dcmdp_jax.commands import convert
from dcmdp_jax.commands.flags import parse
from dcmdp_jax.errors import TrainingStopped
from dcmdp_jax.run.run import Run
from dcmdp_jax.training.loop import train

STEPS = 50
STUCK_AFTER = 20
_SETTINGS = """
    --config.training.steps=50 --config.training.prompts_per_step=8
    --config.training.prompts_per_mini_batch=8 --config.evaluation.every_steps=0
    --config.checkpoint.every_steps=1000 --config.mesh.cpu_devices=1 --config.rollout.precision=fp8
    --config.algorithm.tolerance=0.02 --config.algorithm.tolerance_steps=0
    --config.algorithm.dual_learning_rate=0 --config.algorithm.multiplier_max=1000000
    --config.observe.samples=0 --config.algorithm.method=dc_grpo
""".split()


def _off(logprobs, completion, spread):
    """Log-probs with noise as rounding makes it.

    Lower by at most `spread` nats, the same for the same tokens.
    """
    noise = np.random.default_rng([int(token) for token in completion]).uniform(
        -spread, 0, len(completion)
    )
    return (logprobs + noise).astype(np.float32)


def _noisy(episode, spread):
    moved = episode.rollout_logprobs.copy()
    moved[episode.sampled_mask] = _off(moved[episode.sampled_mask], episode.completion_ids, spread)
    return episode.with_columns(rollout_logprobs=moved)


class Planted:
    """An engine with a fault; everything else is the engine's own."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def change(self, episode, step):
        return episode

    def generate(self, prompts, sampling, *, seed, step, first_prompt=0):
        for group in self._engine.generate(
            prompts, sampling, seed=seed, step=step, first_prompt=first_prompt
        ):
            yield [self.change(episode, step) for episode in group]


class Mismatch(Planted):
    """Log-probs that are off by up to 0.5 nats, as a coarse precision has them.

    The same whenever it is asked.
    """

    spread = 0.5
    scored_spread = 0.5

    def change(self, episode, step):
        return _noisy(episode, self.spread)

    def score(self, prompts, completions, *, temperature):
        scored = self._engine.score(prompts, completions, temperature=temperature)
        pairs = zip(scored, completions, strict=True)
        return [_off(values, completion, self.scored_spread) for values, completion in pairs]


class Noise(Mismatch):
    """An engine that disagrees with itself in another batch shape.

    By half of what it disagrees with the trainer.
    """

    spread = 0.1
    scored_spread = 0.05


class Staleness(Mismatch):
    """Tokens of weights three steps old, and it says so."""

    def change(self, episode, step):
        versions = np.where(
            episode.sampled_mask, np.maximum(episode.policy_versions - 3, 0), -1
        ).astype(np.int32)
        return _noisy(episode, self.spread).with_columns(policy_versions=versions)


class WeightSync(Planted):
    """After some steps it keeps the weights that it has, and says that it took the new ones."""

    def sync_weights(self, params, policy_version):
        if policy_version <= STUCK_AFTER:
            # The trainer's buffers are donated to the step.
            self._kept = jax.tree.map(lambda x: x.copy(), params)
        return self._engine.sync_weights(self._kept, policy_version)


class Support(Planted):
    """Nucleus sampling that the trainer does not know of."""

    def generate(self, prompts, sampling, **options):
        yield from self._engine.generate(
            prompts, dataclasses.replace(sampling, top_p=0.9), **options
        )


class Retokenization(Planted):
    """From the fifth step on every fourth completion comes back one token shorter.

    Two tokens were merged.
    """

    def change(self, episode, step):
        start = episode.prompt_length
        n = episode.num_sampled
        if step < 4 or (episode.group * 4 + episode.member) % 4 or n < 8:
            return episode
        place = start + 2
        return dataclasses.replace(
            episode,
            token_ids=np.delete(episode.token_ids, place),
            sampled_mask=episode.sampled_mask[:-1],
            columns={name: values[:-1] for name, values in episode.columns.items()},
        )


class Identical(Planted):
    """An engine seeded alike for all completions of a group."""

    def generate(self, prompts, sampling, **options):
        for groups in self._engine.generate(prompts, sampling, **options):
            first = {each.group: each for each in reversed(groups)}
            yield [dataclasses.replace(first[each.group], member=each.member) for each in groups]


FAULTS = {
    "noise": (Noise, ()),
    "mismatch": (Mismatch, ()),
    "staleness": (Staleness, ()),
    "weight_sync": (WeightSync, ("--config.optimizer.learning_rate=3e-3",)),
    "support": (Support, ("--config.algorithm.tolerance=1",)),
    "retokenization": (Retokenization, ("--config.algorithm.tolerance=1",)),
    "identical": (Identical, ("--config.algorithm.tolerance=1",)),
    "penalty": (Planted, ("--config.algorithm.tolerance=1", "--config.algorithm.multiplier=1000")),
    "clean": (Planted, ()),
}
"""Fault, which is the alarm's name: the engine's class, and settings beside `_SETTINGS`."""


def _config(run_dir, *settings):
    start = ["train", "--config=configs/demo.py:debug", f"--config.run_dir={run_dir}", *_SETTINGS]
    return parse([*start, *(setting for each in settings for setting in each)]).config


def _policy(directory):
    """A policy that knows the task a little, as a Hugging Face directory."""
    run = directory / "start"
    out = directory / "policy"
    if not out.exists():
        still = "--config.training.steps=1 --config.optimizer.learning_rate=1e-12"
        config = _config(
            run, still.split(), "--config.warmup.steps=300 --config.warmup.batch_size=16".split()
        )
        run = Run.check(config)
        train(run, show=print)
        convert.main(["convert", "export", str(run), str(out), "--dtype", "float32"])
    return out


def main(directory, *names):
    policy = _policy(directory)
    shared = {}
    with contextlib.ExitStack() as end:
        for name in names or FAULTS:
            engine, settings = FAULTS[name]
            own = (
                f"--config.model.path={policy}",
                "--config.warmup.steps=0",
                "--config.observe.on_alarm=stop",
            )
            config = _config(directory / name, settings, own)
            run = Run.check(config)

            def planted(run=run, settings=settings, engine=engine):
                if settings not in shared:
                    shared[settings] = end.enter_context(run.start())
                services = shared[settings]
                return dataclasses.replace(
                    services, engine=engine(services.engine), closing=contextlib.ExitStack()
                )

            handler = logging.FileHandler(directory / f"{name}.log", mode="w")
            logging.getLogger().addHandler(handler)
            try:
                train(run, start_services=planted, show=print)
                print(name, "ended", flush=True)
            except TrainingStopped as stopped:
                print(name, "stopped:", stopped, flush=True)
            finally:
                logging.getLogger().removeHandler(handler)
                handler.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""A small run and a topology of the eight fake CPU devices, for plans that are counted by hand."""

import jax

from configs import qwen3_8b
from dcmdp_jax.config.load import from_config_dict
from dcmdp_jax.plan.topologies import CHIPS, Topology

EIGHT_CHIPS = Topology(name="v5e:2x4", chip=CHIPS["v5e"], devices=jax.devices()[:8])


def small_config(**changes):
    """Settings of a run; `section__name=value` changes one."""
    config = qwen3_8b.get_config("local,debug")
    # XLA's CPU backend aborts on a reduction of bfloat16 between devices.
    config.model.compute_dtype = config.rollout.compute_dtype = config.rollout.precision = "float32"
    # Two mini-batches of 16 completions; one row of 80 tokens a device, so two micro-batches.
    config.training.prompts_per_step, config.training.prompts_per_mini_batch = 8, 4
    config.training.row_lengths = (80,)
    config.training.micro_batch_tokens, config.model.logprob_chunk = 80, 20
    # A loop over layers, as on the hardware that a plan is for.
    config.model.scan_unroll = 1
    for key, value in changes.items():
        section, field = key.split("__")
        setattr(config[section], field, value)
    return from_config_dict(config)

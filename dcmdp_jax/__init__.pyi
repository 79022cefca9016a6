"""Types of the public names, which `__init__.py` imports at their first use."""

from dcmdp_jax.algorithm.advantages import group_advantages as group_advantages
from dcmdp_jax.algorithm.dc_grpo import DcGrpoAux as DcGrpoAux
from dcmdp_jax.algorithm.dc_grpo import dc_grpo_loss as dc_grpo_loss
from dcmdp_jax.algorithm.discrepancy import token_discrepancy as token_discrepancy
from dcmdp_jax.algorithm.dual import dual_update as dual_update
from dcmdp_jax.algorithm.losses import importance_ratio as importance_ratio
from dcmdp_jax.algorithm.penalties import penalized_advantages as penalized_advantages
from dcmdp_jax.algorithm.remedies import Tokens as Tokens
from dcmdp_jax.algorithm.trust_regions import clipped_surrogate as clipped_surrogate
from dcmdp_jax.commands.flags import load_config as load_config
from dcmdp_jax.commands.train import train as train
from dcmdp_jax.config.settings import Config as Config
from dcmdp_jax.data.episode import Episode as Episode
from dcmdp_jax.engines.protocol import Engine as Engine
from dcmdp_jax.errors import UserError as UserError
from dcmdp_jax.observe.metrics_io import read_metrics as read_metrics
from dcmdp_jax.observe.report import write_report as write_report
from dcmdp_jax.version import __version__ as __version__

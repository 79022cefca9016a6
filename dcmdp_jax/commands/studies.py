"""Study files on the command line."""

from __future__ import annotations

from dcmdp_jax.commands.config_files import call_function
from dcmdp_jax.errors import UserError
from dcmdp_jax.lab.studies.study import Study


def load_study(given: str) -> Study:
    """Run a study file's `get_study`, once."""
    study = call_function("--study", given, "get_study", "studies")
    if not isinstance(study, Study):
        location = given.partition(":")[0]
        raise UserError(f"--study: {location}: get_study returned {type(study).__name__}, must be a Study")
    return study

"""Learn from conversations: dcmdp sft --config=FILE [--config.section.name=value ...]."""

from dcmdp_jax.commands import train


def main(argv: list[str]) -> int:
    """Check everything, print the plan, train on conversations, write the report."""
    return train.main(argv, supervised=True)

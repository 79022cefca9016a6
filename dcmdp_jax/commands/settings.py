"""Print every setting in Markdown: dcmdp settings > docs/settings.md."""

from __future__ import annotations

from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.config.text import settings_page


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first, none are known), print the page."""
    Parser("settings", description="Every setting, in Markdown.").parse_args(argv[1:])
    print(settings_page(), end="")

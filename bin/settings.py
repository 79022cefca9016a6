"""Print every setting in Markdown: python -m bin.settings > docs/settings.md."""

from __future__ import annotations

from bin.cli import Parser, run_main
from dcmdp_jax.config.text import settings_page


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first, none are known), print the page."""
    Parser(prog="python -m bin.settings", description="Every setting, in Markdown.").parse_args(argv[1:])
    print(settings_page(), end="")


if __name__ == "__main__":
    run_main(main)

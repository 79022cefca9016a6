"""Print settings: all in Markdown (dcmdp settings > docs/settings.md), those of a word as text (dcmdp settings lr)."""

from __future__ import annotations

import sys

from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.config.text import settings_page, settings_text


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), print the page, or text for a terminal."""
    parser = Parser("settings", description="Every setting: in Markdown for a file, as text for a terminal.")
    parser.add_argument("word", nargs="?", default="", help="only settings whose name holds it, such as rollout or lr")
    word = parser.parse_args(argv[1:]).word
    print(settings_text(word) if word or sys.stdout.isatty() else settings_page(), end="")

"""Print settings: dcmdp settings > docs/settings.md, or those of a word: dcmdp settings lr."""

import sys

from dcmdp_jax.commands import parsers
from dcmdp_jax.commands.main import COMMANDS
from dcmdp_jax.config.settings import setting_names
from dcmdp_jax.config.text import settings_page, settings_text

# zsh has bash's `complete` after bashcompinit. Words go on after "=".
_COMPLETION = """\
[ -n "$ZSH_VERSION" ] && autoload -U +X bashcompinit && bashcompinit
COMP_WORDBREAKS="${COMP_WORDBREAKS//=}"
complete -o default -o nospace -W "%s" dcmdp
"""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), print the page, or text for a terminal."""
    arguments = parsers.settings().parse_args(argv[1:])

    if arguments.completion:
        words = [*COMMANDS]
        words += [f"--config={name}" for name in parsers.preset_names()]
        words += [f"--config.{name}=" for name in setting_names()]
        words += ["--dry-run", "--print-config"]
        print(_COMPLETION % " ".join(words), end="")
    elif arguments.word or sys.stdout.isatty():
        print(settings_text(arguments.word), end="")
    else:
        print(settings_page(), end="")

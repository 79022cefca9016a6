"""Print a script that completes commands, presets and settings in bash and zsh.

source <(dcmdp completion)
"""

from __future__ import annotations

from dcmdp_jax.commands.cli import Parser
from dcmdp_jax.commands.flags import preset_names
from dcmdp_jax.commands.main import COMMANDS
from dcmdp_jax.config.settings import setting_names

# zsh has bash's `complete` after bashcompinit. In bash "=" divides words.
_SCRIPT = """\
if [ -n "$ZSH_VERSION" ]; then autoload -U +X bashcompinit && bashcompinit; fi
_dcmdp() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then COMPREPLY=($(compgen -W "COMMANDS" -- "$word"))
  elif [ "$word" = "=" ]; then [ "$before" = --config ] && COMPREPLY=($(compgen -W "PRESETS"))
  elif [ "$before" = "=" ]; then
    if [ "${COMP_WORDS[COMP_CWORD-2]}" = --config ]; then COMPREPLY=($(compgen -W "PRESETS" -- "$word"))
    else COMPREPLY=($(compgen -f -- "$word")); fi
  elif [[ "$word" == --* ]]; then
    COMPREPLY=($(compgen -W "FLAGS" -- "$word")); compopt -o nospace 2>/dev/null
  else COMPREPLY=($(compgen -f -- "$word")); fi
}
complete -F _dcmdp dcmdp
"""


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first, none are known), print the script."""
    description = "A script that completes in bash and zsh: source <(dcmdp completion)"
    Parser("completion", description=description).parse_args(argv[1:])
    flags = ["--config=", "--dry_run", "--print_config", "--help", *(f"--config.{name}=" for name in setting_names())]
    words = {"COMMANDS": COMMANDS, "PRESETS": preset_names(), "FLAGS": flags}
    script = _SCRIPT
    for place, names in words.items():
        script = script.replace(place, " ".join(names), 1 if place != "PRESETS" else 2)
    print(script, end="")

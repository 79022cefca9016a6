"""Settings as text for people: the page docs/settings.md, and a config with what it changes."""

import dataclasses
import inspect
import textwrap
import typing

from dcmdp_jax.config.load import OTHER_NAMES, unknown_setting
from dcmdp_jax.config.settings import Config
from dcmdp_jax.fields import Declared, declared, get_value

_INTRODUCTION = """\
# Settings

Written by `dcmdp settings > docs/settings.md` from the declarations in `dcmdp_jax/config/settings.py`,
`dcmdp_jax/config/algorithm.py` and `dcmdp_jax/config/rollout.py`; change those.

`--config.section.name=value` overrides a setting of a config file; `--print_config` prints all of them and marks what
differs from the defaults below. "paper" is the DC-GRPO paper with its section in brackets, "ours" a reading or a choice
of this project. A resumed run may change the settings marked *; it alters what is recorded, where the run is computed
and in what portions, or what happens to broken input, not what is learned. Every number is finite and at most
2^31 - 1, a time at most a week. Further rules hold between settings; a broken one is named at the start.
"""


def settings_page() -> str:
    """All settings in Markdown, a table for each section."""
    return _INTRODUCTION + "".join(_sections(Config, ""))


def settings_text(word: str) -> str:
    """Settings as text for a terminal: name, default, what is allowed, what it does.

    Args:
        word: part of the names, or what people call one (`OTHER_NAMES`); "" for all.

    Raises:
        UserError: in one line, if no name holds it.
    """
    wanted = OTHER_NAMES.get(word, word)
    shown = [one for one in declared(Config).values() if wanted in one.name]
    if not shown:
        raise unknown_setting(word)
    lines = []
    for one in shown:
        allowed = f"    # {text}" if (text := _allowed(one)) else ""
        about = textwrap.fill(one.about.doc, 100, initial_indent="    ", subsequent_indent="    ")
        lines += [f"--config.{one.name}={one.default!r}{allowed}", about]
    return "\n".join(lines) + "\n"


def print_config(config: Config) -> str:
    """One line for each setting, `*` and the default where it differs from the default."""
    lines = []
    for one in declared(Config).values():
        value = get_value(config, one.name)
        differs = value != one.default
        lines.append(
            f"{'* ' if differs else '  '}{one.name} = "
            f"{value!r}{f'    # default: {one.default!r}' * differs}"
        )
    return "\n".join(lines)


def _sections(kind: type, prefix: str) -> typing.Iterator[str]:
    if settings := [one for one in declared(kind).values() if "." not in one.name]:
        about = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[0].split())
        yield f"\n## {prefix.rstrip('.') or 'The run'}\n\n{about}\n\n"
        yield (
            "| setting | default | allowed | what it does | default from |\n|---|---|---|---|---|\n"
        )
        for one in settings:
            mark = " *" if one.about.free else ""
            cells = [
                f"`{one.name}`{mark}",
                f"`{one.default!r}`",
                _allowed(one),
                one.about.doc,
                one.about.source,
            ]
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(section := hints[field.name]):
            yield from _sections(section, f"{prefix}{field.name}.")


def _allowed(one: Declared) -> str:
    """Choices or range, and the unit."""
    about = one.about
    if about.choices:
        return ", ".join(about.choices)
    if one.type is bool:
        return "true, false"
    if one.type is str:
        return ""
    low, high = _number(about.minimum), _number(about.maximum)
    bounds = (
        f"{low} .. {high}"
        if low and high
        else f"at least {low}"
        if low
        else f"at most {high}"
        if high
        else ""
    )
    return " ".join(part for part in (bounds, about.unit) if part)


def _number(value: float | None) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if value is not None else ""

"""Settings as text for people: the page docs/settings.md, and a config with what it changes."""

import dataclasses
import inspect
import textwrap
import typing

from dcmdp_jax.config.load import OTHER_NAMES, unknown_setting
from dcmdp_jax.config.settings import Config
from dcmdp_jax.dotted_names import get_value
from dcmdp_jax.fields import Declared, declared

_INTRODUCTION = """\
# Settings

Written by `dcmdp settings > docs/settings.md` from the declarations in \
`dcmdp_jax/config/settings.py`,
`dcmdp_jax/config/algorithm.py` and `dcmdp_jax/config/rollout.py`; change those.

`--config.section.name=value` overrides a setting of a config file; `--print-config` prints all \
of them and marks what
differs from the defaults below. "paper" is the DC-GRPO paper with its section in brackets, \
"ours" a reading or a choice
of this project. A resumed run may change the settings marked *; it alters what is recorded, \
where the run is computed
and in what portions, or what happens to broken input, not what is learned. Every number is \
finite and at most
2^31 - 1, a time at most a week. Further rules hold between settings; a broken one is named at \
the start.
"""


def settings_page() -> str:
    """All settings in Markdown, a table for each section."""
    return _INTRODUCTION + "".join(_sections(Config, ""))


def settings_text(word: str) -> str:
    """Settings as text for a terminal: name, default, what is allowed, what it does.

    Args:
        word: part of the names, or what people call one (`OTHER_NAMES`); "" for all. Where no name
            has it, part of the descriptions.

    Raises:
        UserError: in one line, if neither a name nor a description has it.
    """
    name = OTHER_NAMES.get(word, word)
    every = declared(Config).values()
    settings = [setting for setting in every if name in setting.name]
    if not settings:
        settings = [setting for setting in every if word.lower() in setting.about.doc.lower()]
    if not settings:
        raise unknown_setting(word)
    lines = []
    for setting in settings:
        line = f"--config.{setting.name}={setting.default!r}"
        if _allowed(setting):
            line += f"    # {_allowed(setting)}"
        about = textwrap.indent(textwrap.fill(setting.about.doc, 96), "    ")
        lines += [line, about]
    return "\n".join(lines) + "\n"


def print_config(config: Config) -> str:
    """One line for each setting, `*` and the default where it differs from the default."""
    lines = []
    for setting in declared(Config).values():
        value = get_value(config, setting.name)
        line = f"{setting.name} = {value!r}"
        if value == setting.default:
            lines.append(f"  {line}")
        else:
            lines.append(f"* {line}    # default: {setting.default!r}")
    return "\n".join(lines)


def _sections(kind: type, prefix: str) -> typing.Iterator[str]:
    settings = [setting for setting in declared(kind).values() if "." not in setting.name]
    if settings:
        about = " ".join(inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[0].split())
        yield f"\n## {prefix.rstrip('.') or 'The run'}\n\n{about}\n\n"
        yield (
            "| setting | default | allowed | what it does | default from |\n|---|---|---|---|---|\n"
        )
    for setting in settings:
        mark = " *" if setting.about.free else ""
        cells = [
            f"`{setting.name}`{mark}",
            f"`{setting.default!r}`",
            _allowed(setting),
            setting.about.doc,
            setting.about.source,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _sections(hints[field.name], f"{prefix}{field.name}.")


def _allowed(setting: Declared) -> str:
    """Choices or range, and the unit."""
    about = setting.about
    if about.choices:
        return ", ".join(about.choices)
    if setting.type is bool:
        return "true, false"
    if setting.type is str:
        return ""
    low = _number(about.minimum)
    high = _number(about.maximum)
    bounds = ""
    if low and high:
        bounds = f"{low} .. {high}"
    elif low:
        bounds = f"at least {low}"
    elif high:
        bounds = f"at most {high}"
    return f"{bounds} {about.unit}".strip()


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}"

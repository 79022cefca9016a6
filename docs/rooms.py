"""The package's rooms by their imports: `python -m docs.rooms` writes architecture.md's tables.

It also writes the sizes of the rooms and of the heart's reading list, and for the page's walks the
line numbers, the lines to read and the minutes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT / "dcmdp_jax"
PAGE = _ROOT / "docs" / "architecture.md"
DRAWING = _ROOT / "docs" / "images" / "rooms.svg"
_BEGIN = "<!-- rooms: written by python -m docs.rooms -->\n"
_END = "<!-- end of rooms -->\n"
_SIZE = re.compile(r"^(\| `(\w+)` \|.*\|) [\d,]+ \|$", re.MULTILINE)
_WALK = re.compile(
    r"^(\*\*[^*]+\*\*) \((\d+) definitions, (\d+) lines, (\d+) minutes\)(.*?)(?=^\*\*|^## )",
    re.MULTILINE | re.DOTALL,
)
_COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
LINES_A_MINUTE = 25
"""Lines of this code, docstrings included, that a newcomer reads in a minute."""
_PLACE = re.compile(r"^(    )([\w/]+\.py):(\d+) +([\w.]+) +", re.MULTILINE)
_QUOTE = re.compile(r"^ {8}([\w/]+\.py):(\d+) +([\w.]+): +(\S.*)$", re.MULTILINE)
_HEART = re.compile(r"^\| `(\w+)` \| (all|`\w+\.py`(?:, `\w+\.py`)*) \| [\d,]+ \|$", re.MULTILINE)
_HEART_TOTAL = re.compile(r"^\| in all \| \| ([\d,]+) \|$", re.MULTILINE)
_WIDTH = 900
_BOX = (118, 34)
_FLOOR = 92

Rooms = Mapping[str, frozenset[str]]


def rooms() -> Rooms:
    """Room -> the rooms that its modules import, in any function."""
    names = sorted(
        path.parent.name for path in _PACKAGE.glob("*/__init__.py") if not path.parent.is_symlink()
    )
    found = {}
    for name in names:
        trees = [
            ast.parse(path.read_text(encoding="utf-8")) for path in (_PACKAGE / name).rglob("*.py")
        ]
        imported = {
            words[1]
            for tree in trees
            for words in _imports(tree)
            if words[0] == "dcmdp_jax" and words[1:]
        }
        found[name] = frozenset(imported & set(names) - {name})
    return found


def code_tokens(text: str) -> int:
    """Number of names, operators, numbers and strings that are no docstrings."""
    docstring_lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    lines = range(statement.lineno, statement.end_lineno + 1)
                    docstring_lines.update(lines)

    return sum(
        token.type in _COUNTED and token.start[0] not in docstring_lines
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def size_of(room: str) -> int:
    """Tokens of a room's code, to the nearest five hundred."""
    files = (_PACKAGE / room).rglob("*.py")
    tokens = sum(code_tokens(path.read_text(encoding="utf-8")) for path in files)
    return round(tokens / 500) * 500


def with_heart(page: str) -> str:
    """The page with the tokens of the heart's reading list anew, and their sum."""
    total = 0

    def row(match: re.Match[str]) -> str:
        nonlocal total
        room, names = match.groups()
        tokens = sum(code_tokens(path.read_text(encoding="utf-8")) for path in _heart(room, names))
        total += tokens
        return f"| `{room}` | {names} | {round(tokens, -2):,} |"

    page = _HEART.sub(row, page)
    return _HEART_TOTAL.sub(f"| in all | | {round(total, -2):,} |", page)


def heart_tokens(page: str) -> int:
    """Tokens of the heart's reading list as the page has them."""
    return int(_HEART_TOTAL.search(page)[1].replace(",", ""))


def _heart(room: str, names: str) -> list[Path]:
    """The files of a row of the reading list, `all` or named one by one."""
    if names == "all":
        return sorted((_PACKAGE / room).rglob("*.py"))
    return [_PACKAGE / room / name for name in re.findall(r"`([\w.]+)`", names)]


def without_sizes(page: str) -> str:
    """The page without the sizes of its rooms, which every change of code moves."""
    return _SIZE.sub(r"\1", page)


def sizes(page: str) -> dict[str, int]:
    """Room -> the size that the page has."""
    return {
        match[2]: int(match[0].split("|")[-2].replace(",", ""))
        for match in _SIZE.finditer(page.partition(_BEGIN)[2])
    }


def _imports(tree: ast.AST) -> Iterator[list[str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}".split(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)


def direct(table: Rooms) -> Rooms:
    """The arrows that no longer way replaces."""

    def reached(room: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in table[room]))

    return {room: frozenset(to - set().union(*map(reached, to))) for room, to in table.items()}


def floors(table: Rooms) -> list[list[str]]:
    """Rooms by the longest way down from them, highest first."""

    def height(room: str) -> int:
        return max((1 + height(other) for other in table[room]), default=0)

    heights = {room: height(room) for room in table}
    return [
        [room for room in table if heights[room] == level]
        for level in range(max(heights.values()), -1, -1)
    ]


def page_block(table: Rooms) -> str:
    """The generated part of the page."""
    image = "![Packages, each above those that it imports](images/rooms.svg)"
    lines = [f"{image}\n\n| package | content | tokens |\n|---|---|---|\n"]
    for floor in floors(table):
        for room in floor:
            module = ast.parse((_PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
            about = " ".join(ast.get_docstring(module).split())
            lines.append(f"| `{room}` | {about} | {size_of(room):,} |\n")
    beside = sorted(
        f"`{path.stem}`" for path in _PACKAGE.glob("*.py") if not path.stem.startswith("__")
    )
    return (
        "".join(lines)
        + f"\nModules beside the packages, which all may import: {', '.join(beside)}.\n"
    )


def drawing(table: Rooms) -> str:
    """The rooms as an SVG: floors, and an arrow for each import that no longer way replaces."""
    rows, (width, height) = floors(table), _BOX
    middle = {
        room: (_WIDTH * (2 * place + 1) // (2 * len(floor)), 30 + level * _FLOOR)
        for level, floor in enumerate(rows)
        for place, room in enumerate(floor)
    }
    shapes = [
        f'<line x1="{middle[room][0]}" y1="{middle[room][1] + height // 2}" '
        f'x2="{middle[other][0]}" y2="{middle[other][1] - height // 2 - 3}" stroke="#8a8a8a" '
        'marker-end="url(#head)"/>'
        for room, to in direct(table).items()
        for other in sorted(to)
    ]
    for room, (x, y) in middle.items():
        shapes.append(
            f'<rect x="{x - width // 2}" y="{y - height // 2}" width="{width}" height="{height}" '
            f'rx="5" fill="#eef3f8" stroke="#0072B2"/>\n<text x="{x}" y="{y + 5}" '
            f'text-anchor="middle">{room}</text>'
        )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto">'
    )
    return (
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} '
            f'{60 + (len(rows) - 1) * _FLOOR}" font-family="sans-serif" font-size="15">\n<rect '
            f'width="100%" height="100%" fill="#ffffff"/>\n<defs>{head}<path d="M0 0 L8 4 L0 8 z" '
            'fill="#8a8a8a"/></marker></defs>\n'
        )
        + "\n".join(shapes)
        + "\n</svg>\n"
    )


def with_rooms(page: str, table: Rooms) -> str:
    """The page with its generated part anew."""
    block = f"(?<={re.escape(_BEGIN)}).*(?={re.escape(_END)})"
    return re.sub(block, lambda _: page_block(table), page, flags=re.DOTALL)


def places(page: str) -> list[tuple[str, str, int]]:
    """File, name and line of each place that a walk of the page names."""
    return [(file, name, int(line)) for _, file, line, name in _PLACE.findall(page)]


def walks(page: str) -> list[tuple[str, tuple[int, int], str]]:
    """Question, places and lines to read as the page has them, and the text of each walk."""
    found = _WALK.finditer(page)
    return [(match[1].strip("*"), (int(match[2]), int(match[3])), match[5]) for match in found]


def walk_of(text: str) -> tuple[int, int]:
    """Places that a walk names, and the lines of their definitions."""
    nodes = [_definition(file, name) for file, name, _ in places(text)]
    return len(nodes), sum(node.end_lineno - node.lineno + 1 for node in nodes)


def line_of(file: str, name: str) -> int:
    """The line that defines a function, class, method, constant or field of a module."""
    return _definition(file, name).lineno


def _definition(file: str, name: str) -> ast.stmt:
    body = ast.parse((_PACKAGE / file).read_text(encoding="utf-8")).body
    for word in name.split("."):
        [node] = [node for node in body if word in (getattr(node, "name", None), _assigned(node))]
        body = getattr(node, "body", [])
    return node


def quotes(page: str) -> list[tuple[str, int, str, str]]:
    """File, line, name of the definition and code of each line of code that the page quotes."""
    quoted_lines = _QUOTE.findall(page)
    return [(file, int(line), name, code) for file, line, name, code in quoted_lines]


def line_of_code(file: str, name: str, code: str) -> int:
    """The line of a definition that holds `code`."""
    node = _definition(file, name)
    lines = (_PACKAGE / file).read_text(encoding="utf-8").splitlines()
    numbers = range(node.lineno, node.end_lineno + 1)
    [line] = [number for number in numbers if code in lines[number - 1]]
    return line


def _assigned(node: ast.AST) -> str | None:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
    return targets[0].id if targets and isinstance(targets[0], ast.Name) else None


def with_lines(page: str) -> str:
    """The page with the line numbers of its walks anew, their lines to read and the minutes."""

    def place(match: re.Match[str]) -> str:
        indent, file, _, name = match.groups()
        return f"{indent}{f'{file}:{line_of(file, name)}':<32}{name:<34}"

    def quote(match: re.Match[str]) -> str:
        file, _, name, code = match.groups()
        line = f"{file}:{line_of_code(file, name, code)}"
        return f"{'':8}{line:<40}{name}: {code}"

    def walk(match: re.Match[str]) -> str:
        count, lines = walk_of(match[5])
        return (
            f"{match[1]} ({count} definitions, {lines} lines, {-(-lines // LINES_A_MINUTE)} "
            f"minutes){match[5]}"
        )

    return _WALK.sub(walk, _QUOTE.sub(quote, _PLACE.sub(place, page)))


if __name__ == "__main__":
    now = rooms()
    page = PAGE.read_text(encoding="utf-8")
    page = with_lines(with_heart(with_rooms(page, now)))
    PAGE.write_text(page, encoding="utf-8")
    DRAWING.write_text(drawing(now), encoding="utf-8")

"""docs/architecture.md: its table and drawing are those of the imports, and what its drawings name
exists.
"""

import re
from pathlib import Path

import pytest

from docs import rooms

_ROOT = Path(__file__).resolve().parents[1]
_PAGE = rooms.PAGE.read_text()
_PACKAGE = _ROOT / "dcmdp_jax"


def test_table_and_drawing_are_those_of_the_imports():
    table = rooms.rooms()
    written = rooms.with_rooms(_PAGE, table)
    assert rooms.without_sizes(written) == rooms.without_sizes(_PAGE), "python -m docs.rooms"
    now = rooms.sizes(written)
    said = rooms.sizes(_PAGE)
    assert now.keys() == said.keys() == table.keys()
    stale = {
        room: (said[room], size)
        for room, size in now.items()
        if abs(said[room] - size) > 500 + size / 10
    }
    assert not stale, f"{stale}: python -m docs.rooms"
    assert rooms.DRAWING.read_text() == rooms.drawing(table), "python -m docs.rooms"


def test_the_reading_list_of_the_heart_counts_its_files():
    said = rooms.heart_tokens(_PAGE)
    now = rooms.heart_tokens(rooms.with_heart(_PAGE))
    assert abs(said - now) <= now / 50, f"{said}, now {now}: python -m docs.rooms"


def test_the_heart_by_hand():
    # A row names its files, and no other file of the room is counted.
    page = "| `algorithm` | `dual.py`, `stats.py` | 1 |\n| in all | | 1 |\n"
    files = [_PACKAGE / "algorithm" / name for name in ("dual.py", "stats.py")]
    tokens = [rooms.code_tokens(path.read_text()) for path in files]
    assert tokens[0] > 300 and tokens[1] > 800
    assert rooms.heart_tokens(rooms.with_heart(page)) == round(sum(tokens), -2)


def test_floors_and_arrows_by_hand():
    # a imports b and c, b imports c: a's arrow to c has a longer way.
    table = {"a": frozenset("bc"), "b": frozenset("c"), "c": frozenset(), "d": frozenset()}
    assert rooms.direct(table) == {
        "a": frozenset("b"),
        "b": frozenset("c"),
        "c": frozenset(),
        "d": frozenset(),
    }
    assert rooms.floors(table) == [["a"], ["b"], ["c", "d"]]
    assert rooms.drawing(table).count("<line") == 2 and rooms.drawing(table).count("<rect x") == 4


def _drawings():
    return re.findall(r"^## The life of a (\w+)\n(.*?)(?=^## )", _PAGE, re.MULTILINE | re.DOTALL)


def test_there_are_three_lives():
    assert [name for name, _ in _drawings()] == ["batch", "weight", "setting"]


@pytest.mark.parametrize(
    "drawing", [drawing for _, drawing in _drawings()], ids=[name for name, _ in _drawings()]
)
def test_what_a_drawing_names_exists(drawing):
    files = re.findall(r"\b([\w/]+/\w+\.(?:py|md)|types\.py)", drawing)
    assert len(files) > 5
    for file in files:
        assert (_PACKAGE / file).exists() or (_ROOT / file).exists(), file
    sources = "".join(
        path.read_text() for path in (*_PACKAGE.rglob("*.py"), _ROOT / "configs" / "base.py")
    )
    functions = re.findall(r"(?:\||--|\+--) +([a-z]\w*_\w+|pack|[A-Z]\w+\.\w+)\b", drawing)
    assert functions
    for name in (function.rpartition(".")[2] for function in functions):
        assert re.search(rf"\bdef {name}\b|^    {name}: ", sources, re.MULTILINE), name


def test_walks_name_what_is_defined_there():
    found = rooms.places(_PAGE)
    assert len(found) > 15
    for file, name, line in found:
        at = rooms.line_of(file, name)
        assert abs(at - line) <= 30, (
            f"{file}: {name} is in line {at}, not {line}: python -m docs.rooms"
        )
    assert {"clipped_surrogate", "row_signals", "PENALTIES"} <= {name for _, name, _ in found}


def test_the_lines_of_algorithm_1_stand_where_the_page_says():
    quotes = rooms.quotes(_PAGE)
    assert len(quotes) > 20
    for file, line, name, code in quotes:
        now = rooms.line_of_code(file, name, code)
        assert abs(now - line) <= 30, f"{file}: {name} has it in line {now}: python -m docs.rooms"
    assert {"token_discrepancy", "group_advantages", "penalized_advantages", "dual_update"} <= {
        name for _, _, name, _ in quotes
    }


def test_walks_say_how_much_there_is_to_read():
    found = rooms.walks(_PAGE)
    assert [question.split()[0] for question, *_ in found] == "Where What How How How Why".split()
    for question, (places, lines), text in found:
        now = rooms.walk_of(text)
        assert now[0] == places and abs(now[1] - lines) <= 30 + lines / 5, (
            f"{question} {now}: python -m docs.rooms"
        )


def test_the_lines_of_a_walk_by_hand():
    # A constant on one line; a field of the settings, too.
    places = (
        "algorithm/dual.py:7    MULTIPLIER_MAX    a",
        "config/algorithm.py:9    AlgorithmSettings.method    b",
    )
    assert rooms.walk_of("".join(f"    {place}\n" for place in places)) == (2, 2)

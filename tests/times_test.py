"""No test says how long anything takes: an assertion that compares seconds fails beside other
work.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
}
CLOCKS |= {"thread_time", "thread_time_ns", "time", "time_ns"}
# Its assertion is the limit against hanging.
ALLOWED = {"tests/support/waiting.py"}


def _names_of_seconds(tree: ast.AST) -> set[str]:
    """Variables and functions of a module whose value comes from a clock."""
    names: set[str] = set()
    while True:
        before = len(names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and _has_seconds(node.value, names):
                names |= {
                    name.id
                    for target in node.targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                }
            elif isinstance(node, ast.NamedExpr | ast.AnnAssign | ast.AugAssign):
                if (
                    node.value is not None
                    and _has_seconds(node.value, names)
                    and isinstance(node.target, ast.Name)
                ):
                    names.add(node.target.id)
            elif isinstance(node, ast.FunctionDef):
                returned = [
                    inner.value
                    for inner in ast.walk(node)
                    if isinstance(inner, ast.Return) and inner.value
                ]
                if any(_has_seconds(value, names) for value in returned):
                    names.add(node.name)
        if len(names) == before:
            return names


def _has_seconds(expression: ast.AST, names: set[str]) -> bool:
    """Whether a clock is read in the expression, or a name of seconds is."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name) and node.id in names:
            return True
        if isinstance(node, ast.Call):
            function = node.func
            of_module = (
                isinstance(function, ast.Attribute) and ast.unparse(function.value) == "time"
            )
            if of_module and function.attr in CLOCKS:
                return True
            if isinstance(function, ast.Name) and function.id in CLOCKS:
                return True
    return False


def _modules(source: str) -> Iterator[ast.Module]:
    """A module, and the programs that it holds as strings."""
    tree = ast.parse(source)
    yield tree
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and "import " in node.value
        ):
            try:
                yield ast.parse(node.value)
            except SyntaxError:
                continue


def compared_seconds(source: str) -> list[str]:
    """The assertions of a file that compare seconds."""
    found = []
    for tree in _modules(source):
        names = _names_of_seconds(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assert):
                comparisons = [
                    inner for inner in ast.walk(node.test) if isinstance(inner, ast.Compare)
                ]
                if any(_has_seconds(comparison, names) for comparison in comparisons):
                    found.append(ast.unparse(node.test))
    return found


def test_a_comparison_of_seconds_is_seen():
    """Written out, in a variable, by a helper, in a program of its own."""
    of_a_helper = (
        "def spent(f):\n    a = time.process_time()\n    f()\n    return time.process_time() - a\n"
    )
    assert compared_seconds("assert x == 1 and time.monotonic() - began < 3") != []
    assert compared_seconds("took = perf_counter() - began\nassert took < 3") != []
    assert (
        compared_seconds(
            of_a_helper + "def test():\n    seconds = spent(len)\n    assert seconds < 0.05"
        )
        != []
    )
    assert compared_seconds("PROGRAM = 'import time; assert time.time() < 5'") != []
    assert (
        compared_seconds("began = time.monotonic()\nassert doing.done == 3\ndone.wait(HANGS_S)")
        == []
    )


def test_no_test_compares_seconds():
    files = [
        path
        for folder in ("tests", "research/tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    found = {
        name: assertions
        for path in files
        if (name := path.relative_to(ROOT).as_posix()) not in ALLOWED
        and name != "tests/times_test.py"
        if (assertions := compared_seconds(path.read_text(encoding="utf-8")))
    }
    assert len(files) > 300 and found == {}

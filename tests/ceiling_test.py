"""The ceiling of code lines of the package and its commands, lowered when code goes, raised only with a reason."""

import ast
import io
import tokenize
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_CEILING = 30_900
_NO_CODE = {getattr(tokenize, n) for n in "COMMENT NL NEWLINE INDENT DEDENT ENCODING ENDMARKER".split()}


def code_lines(text):
    """Number of lines that hold code: no blank lines, comments or docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_code_lines_by_hand():
    # The docstring, the comment and the blank line are none; a call over two lines is two.
    text = '"""Docstring."""\n\n# comment\nx = f(\n    1)\ndef g():\n    """Of two\n    lines."""\n    return x\n'
    assert code_lines(text) == 4


def test_package_and_commands_stay_below_the_ceiling():
    files = [path for top in ("dcmdp_jax", "bin") for path in sorted((_ROOT / top).rglob("*.py"))]
    total = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
    assert total <= _CEILING, f"{total} lines of code: delete as many as are added"

"""Run the notebooks and keep their outputs in them, so that GitHub shows them: `python -m
docs.stored_outputs [NAME ...]`. `make docs-environment` installs what it needs.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = _ROOT / "docs" / "notebooks"
_TEMPORARY = re.compile(r"/tmp/\w+")
_PROGRESS = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
_TIMEOUT_S = 3600


def shown_text(text: str) -> str:
    """A program's output without its progress lines and machine paths, of which a temporary
    directory is OUT.
    """
    lines = [line for line in text.replace("\r", "").splitlines(True) if not _PROGRESS.match(line)]
    return _TEMPORARY.sub("OUT", "".join(lines)).replace(f"{_ROOT}/", "")


def run_and_store(path: Path) -> None:
    """Run a notebook from its folder, but for the cell that installs the package.

    Raises:
        CellExecutionError: if a cell fails; the file is left as it was.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    kernel = NotebookClient(
        notebook,
        timeout=_TIMEOUT_S,
        kernel_name="python3",
        skip_cells_with_tag="skip-execution",
        resources={"metadata": {"path": str(path.parent)}},
    )
    kernel.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = shown_outputs(cell.outputs)
    nbformat.write(notebook, path)


def shown_outputs(outputs: list[dict]) -> list[dict]:
    """The outputs of a cell: what was printed as one, without stderr, and values and figures."""
    printed = [output for output in outputs if output.get("name") == "stdout"]
    others = [output for output in outputs if output["output_type"] != "stream"]
    for output in others:
        for kind, content in output.get("data", {}).items():
            if kind.startswith("text/"):
                output["data"][kind] = shown_text(content)
    if not printed:
        return others
    printed[0]["text"] = shown_text("".join(output["text"] for output in printed))
    return [printed[0], *others]


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(_ROOT)
    names = sys.argv[1:] or [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    for name in names:
        run_and_store(NOTEBOOKS / f"{name}.ipynb")

"""Every table and figure of research/, from the kept metrics: `python -m research`, or `python -m
research NAME ...`.

Writes tables/NAME.txt and images/NAME.png. What made the metrics stands at the head of each study
and page.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from research import (
    ascents,
    certificates,
    dose_tables,
    doses,
    frozen_tables,
    kept_studies,
    long_tables,
    paper_regime,
    penalty_gradients,
    penalty_in_a_real_model,
    repeated,
    theory_tables,
)
from research.kept_studies import KEPT, STUDIES
from research.oracle import table as oracle
from research.studies.results import DPI, read_kept_metrics, tables
from research.studies.sweep import load_study

HERE = Path(__file__).resolve().parent
TABLES = HERE / "tables"
IMAGES = HERE / "images"
_BY_ENTROPY = [name for name in STUDIES if name.startswith(("dose_response", "map_"))]
_BY_ARM = (
    "planted",
    "embedded",
    "int4",
    "vllm",
    "methods",
    "dual_learning_rate",
    "multiplier",
    "tolerance",
)
_BY_ARM += ("lag", "lag_corrections")


def _kept(name: str) -> Path:
    return KEPT / f"{name}.jsonl.gz"


def _by_arm(name: str) -> str:
    """Means of every arm and differences to the baseline, as `python -m research.studies` writes
    them.
    """
    study = load_study(str(HERE.parent / STUDIES[name]))
    runs = {
        arm: seeds
        for arm, seeds in read_kept_metrics(_kept(name), list(study.arms)).items()
        if seeds
    }
    return tables(study.title, runs, study.baseline, [])


def _long(name: str) -> str:
    return long_tables.STUDIES[name](_kept(name))[0]


def _drawn(name: str, stem: str) -> dict[str, Figure]:
    return {stem: long_tables.STUDIES[name](_kept(name))[1]}


def _dose(name: str) -> str:
    path = KEPT / "oracle.json" if name == "dose_response" else None
    return dose_tables.text(long_tables.read(_kept(name)), path)


def _frozen() -> str:
    return "\n\n".join(
        f"{name}\n\n{text}"
        for name, text in frozen_tables.tables(frozen_tables.read_kept()).items()
    )


def _penalty_in_a_real_model() -> str:
    return penalty_in_a_real_model.table(
        json.loads(penalty_in_a_real_model.KEPT.read_text(encoding="utf-8"))
    )


def _regime(name: str) -> str:
    return paper_regime.text(paper_regime.read_kept(name))


def _penalty_gradients(name: str) -> str:
    return penalty_gradients.gradient_table(
        json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    )


_DOSES = {
    name: (runs, setting.margin)
    for name, setting in {"doses": doses.COARSE, "doses_late": doses.LATE}.items()
    if (runs := doses.read_complete(setting))
}
"""Studies of doses whose seeds are all there."""
_GRADIENTS = ("penalty_gradients", "smollm2_penalty_gradients")
_REGIMES = [name for name in STUDIES if name.startswith("paper_regime")]
TEXTS: Mapping[str, Callable[[], str]] = {
    "arms": kept_studies.arms_text,
    "ascents": ascents.text,
    "repeated": repeated.text,
    **{name: functools.partial(_long, name) for name in long_tables.STUDIES},
    **{name: functools.partial(_dose, name) for name in _BY_ENTROPY},
    **{name: functools.partial(_by_arm, name) for name in _BY_ARM},
    "frozen": _frozen,
    "oracle": oracle.text,
    "certificates": certificates.text,
    "theory": theory_tables.text,
    **{name: functools.partial(_penalty_gradients, name) for name in _GRADIENTS},
    **(
        {"penalty_in_a_real_model": _penalty_in_a_real_model}
        if penalty_in_a_real_model.KEPT.exists()
        else {}
    ),
    **{name: functools.partial(_regime, name) for name in _REGIMES},
    **{name: functools.partial(doses.text, *study) for name, study in _DOSES.items()},
}
"""Name -> the text of tables/NAME.txt."""
_STEMS = {name: "smollm2_int4" if name == "smollm2" else name for name in long_tables.STUDIES}
FIGURES: Mapping[str, Callable[[], Mapping[str, Figure]]] = {
    **{name: functools.partial(_drawn, name, stem) for name, stem in _STEMS.items()},
    "dose_response_vllm": lambda: dose_tables.figures(
        long_tables.read(_kept("dose_response_vllm"))
    ),
    "dose_response": lambda: dose_tables.figures(
        long_tables.read(_kept("dose_response")), KEPT / "oracle.json"
    ),
    "paper_regime": lambda: paper_regime.figures(paper_regime.read_kept("paper_regime")),
    "frozen": lambda: {"frozen": frozen_tables.draw(frozen_tables.read_kept())},
    **(
        {"doses": lambda: {"small_doses": doses.draw(*_DOSES["doses"])}}
        if "doses" in _DOSES
        else {}
    ),
}
"""Name -> figures by the stem of their file in images/."""


def main() -> None:
    """Write the tables and figures of these names, else of all."""
    parser = argparse.ArgumentParser(
        prog="python -m research", description="Remake tables and figures."
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(TEXTS)}"
    )
    names = parser.parse_args().names or list(TEXTS)
    for name in names:
        if name not in TEXTS:
            parser.error(f"got {name}, allowed are {', '.join(TEXTS)}")
    for name in names:
        (TABLES / f"{name}.txt").write_text(TEXTS[name](), encoding="utf-8")
        for stem, figure in FIGURES[name]().items() if name in FIGURES else ():
            figure.savefig(IMAGES / f"{stem}.png", dpi=DPI)


if __name__ == "__main__":
    main()

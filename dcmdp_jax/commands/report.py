"""Draw one or several runs: plots as PNG and one self-contained HTML page.

    dcmdp report RUNDIR [RUNDIR ...] [--out DIR]

One run's report goes into its own directory, a comparison into `report/`, unless --out says
otherwise.
"""

from pathlib import Path

from dcmdp_jax.commands import parsers
from dcmdp_jax.observe.jsonl import PLOTS_DIRECTORY
from dcmdp_jax.observe.report import write_report


def main(argv: list[str]) -> None:
    """Parse the arguments (program name first), write the report, print where it is."""
    arguments = parsers.report().parse_args(argv[1:])

    run_dirs = arguments.run_dirs
    default_dir = run_dirs[0] if len(run_dirs) == 1 else "report"
    out_dir = arguments.out or Path(default_dir)
    report = write_report(run_dirs, out_dir)
    print(f"wrote {report} and {out_dir / PLOTS_DIRECTORY}/*.png")

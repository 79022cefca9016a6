"""Progress of a run: the last lines of a terminal, or plain lines in a log file or notebook."""

from __future__ import annotations

import collections
import contextlib
import io
import math
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dcmdp_jax.activity import displayed, say, terminal_size
from dcmdp_jax.number_format import duration, number
from dcmdp_jax.observe.alarms import spent
from dcmdp_jax.observe.metric_names import form_of_score

_PLAIN_INTERVAL_SECONDS = 2.0
_RECENT_STEPS = 20
_UPDATE = {
    "loss": "policy/loss",
    "engine KL": "mismatch/k3",
    "reference KL": "policy/kl",
    "entropy": "policy/entropy",
    "length": "completion/length_mean",
    "gradient": "optimizer/grad_norm",
}
"""Word on the console -> metric."""


class Progress:
    """Display of a run: step, reward, discrepancy and c, lambda, the update's numbers, tokens/s, time left.

    A terminal shows them in its last lines (`dcmdp_jax.activity`). Elsewhere each step is a line, at most one every two
    seconds; the first and the last step are always shown. Time left is the mean duration of the last 20
    steps, excluding the first (it compiles), times the remaining steps.

    Args:
        total_steps: last step of the run.
        start_step: finished steps at the start; above 0 for a resumed run.
        measured_steps: first steps, on which c is measured: none is shown there.
        clock: seconds, monotonic.

    Raises:
        ValueError: unless 0 <= start_step <= total_steps.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        measured_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= start_step <= total_steps:
            raise ValueError(f"start_step is {start_step}; allowed: 0 to total_steps = {total_steps}")
        self._total = total_steps
        self._first = start_step + 1
        self._step, self._measured = start_step, measured_steps
        self._values: dict[str, float] = {}
        self._clock = clock
        self._began = self._last_step_at = clock()
        self._last_line_at = -math.inf
        self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._shown = contextlib.ExitStack()
        self._show = self._shown.enter_context(displayed(self._lines)) if terminal_size() else None

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the host values of a finished step, or of an evaluation at the current step.

        Args:
            step: finished steps. Values that are missing, None or NaN show as "-".
            metrics: named as in `dcmdp_jax.observe.metric_names`; an `eval/.../avg@K` is shown until the next one.
        """
        now = self._clock()
        if step > self._step:
            self._values = {name: value for name, value in self._values.items() if name.startswith("eval")}
            if self._step >= self._first:
                self._durations.extend([(now - self._last_step_at) / (step - self._step)] * (step - self._step))
            self._step, self._last_step_at = step, now
        self._values.update({name: math.nan if value is None else float(value) for name, value in metrics.items()})
        if self._show is not None:
            self._show()
            return
        due = now - self._last_line_at >= _PLAIN_INTERVAL_SECONDS or self._step == self._total
        if "reward/mean" in metrics and (due or self._step == self._first):
            say(f"step {self._step}/{self._total}  {'  '.join(text for text, _ in self._fields())}")
            self._last_line_at = now
        elif "reward/mean" not in metrics:
            evaluation = self._evaluation()
            if evaluation:
                say(f"step {self._step}/{self._total}  {evaluation}")

    def close(self) -> None:
        """Give the terminal's last lines back, with the last state above. Safe to call twice."""
        last = [] if self._show is None else self._lines(terminal_size().columns - 1)
        self._show = None
        self._shown.close()
        for line in last:
            say(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def seconds_left(self) -> float:
        """Estimate the seconds to the last step; NaN before two steps have finished, 0 at the end."""
        if self._step >= self._total:
            return 0.0
        if not self._durations:
            return math.nan
        return sum(self._durations) / len(self._durations) * (self._total - self._step)

    def _fields(self) -> list[tuple[str, str]]:
        """Return (text, rich style) of every quantity, in order."""

        def get(name: str) -> float:
            return self._values.get(name, math.nan)

        discrepancy, tolerance = get(spent(self._values)), get("dual/tolerance")
        shown = f"discrepancy {number(discrepancy, '.5f')}"
        style = ""
        if not math.isnan(tolerance) and self._step > self._measured:
            shown += f" (c {number(tolerance, '.5f')})"
            style = "red" if discrepancy > tolerance else "green"
        return [
            (f"reward {number(get('reward/mean'), '.3f')}", "bold"),
            (shown, style),
            (f"lambda {number(get('dual/multiplier'), '.4f')}", ""),
            *((f"{word} {number(get(name), '.3g')}", "dim") for word, name in _UPDATE.items() if name in self._values),
            (f"{number(get('throughput/tokens_per_second'), ',.0f')} tokens/s", ""),
            (f"left {duration(self.seconds_left())}", ""),
        ]

    def _evaluation(self) -> str:
        return "  ".join(
            f"{name.removeprefix('eval/').replace('/', ' ')} {form_of_score(name, [value], self._values)(value)}"
            for name, value in sorted(self._values.items())
            if name.startswith("eval/") and "/avg@" in name
        )

    def _lines(self, columns: int) -> list[str]:
        """The display as lines with ANSI colors."""
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {self._step}/{self._total}"),
            ProgressBar(total=max(self._total, 1), completed=self._step),
            Text(f"elapsed {duration(self._clock() - self._began)}", style="dim"),
        )
        line = Text("  ").join(Text(text, style=style) for text, style in self._fields())
        more = [Text(evaluation, style="cyan")] if (evaluation := self._evaluation()) else []
        console = Console(file=io.StringIO(), width=columns, force_terminal=True)
        console.print(Group(bar, line, *more))
        return console.file.getvalue().splitlines()

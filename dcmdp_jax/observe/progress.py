"""Progress of a run: the last lines of a terminal, or plain lines in a log file or notebook."""

import collections
import math
import textwrap
import time
from collections.abc import Callable, Mapping

from dcmdp_jax.activity import Activity, colored, end, refresh, register, say, terminal_size
from dcmdp_jax.number_format import duration, number
from dcmdp_jax.observe.alarms import bounded_metric
from dcmdp_jax.observe.metric_names import form_of_score

_PLAIN_INTERVAL_SECONDS = 2.0
_RECENT_STEPS = 20
_RED = "\x1b[31m"
_GREEN = "\x1b[32m"
_UPDATE = {
    "loss": "policy/loss",
    "engine KL": "mismatch/k3",
    "reference KL": "policy/kl",
    "entropy": "policy/entropy",
    "length": "completion/length_mean",
    "gradient": "optimizer/grad_norm",
}
"""Word on the console -> metric."""


class Progress(Activity):
    """Display of a run: step, reward, discrepancy, c, lambda, the update, tokens/s, time left.

    A terminal shows them in its last lines (`dcmdp_jax.activity`). Elsewhere each step is a line,
    at most one every two seconds; the first and the last step are always shown. Time left is the
    mean duration of the last 20 steps, excluding the first (it compiles), times the remaining
    steps.

    Args:
        total_steps: last step of the run.
        start_step: finished steps at the start; above 0 for a resumed run.
        measured_steps: first steps, on which c is measured: none is shown there.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        *,
        measured_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("training", total_steps, "steps", start_step, clock(), stays=True)
        self._first = start_step + 1
        self._measured = measured_steps
        self._clock = clock
        self._values: dict[str, float] = {}
        self._last_step_at = self.began
        self._last_line_at = -math.inf
        self._durations: collections.deque[float] = collections.deque(maxlen=_RECENT_STEPS)
        self._live = terminal_size() is not None and register(self)

    def update(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show the host values of a finished step, or of an evaluation at the current step.

        Args:
            step: finished steps. Values that are missing, None or NaN show as "-".
            metrics: named as in `dcmdp_jax.observe.metric_names`; an `eval/.../avg@K` is shown
                until the next one.
        """
        now = self._clock()
        if step > self.done:
            for name in list(self._values):
                if not name.startswith("eval"):
                    del self._values[name]
            if self.done >= self._first:
                steps = step - self.done
                self._durations.extend([(now - self._last_step_at) / steps] * steps)
            self.done = step
            self._last_step_at = now
        for name, value in metrics.items():
            self._values[name] = math.nan if value is None else value
        if self._live:
            refresh()
            return

        due = now - self._last_line_at >= _PLAIN_INTERVAL_SECONDS or self.done == self.total
        trained = "reward/mean" in metrics or _UPDATE["loss"] in metrics
        if trained and (due or self.done == self._first):
            say(f"step {self.done}/{self.total}  {'  '.join(self._fields())}")
            self._last_line_at = now
        elif not trained and self._evaluation():
            say(f"step {self.done}/{self.total}  {self._evaluation()}")

    def close(self) -> None:
        """Give the terminal's last lines back, with the last state above. Safe to call twice."""
        if self._live:
            last = self.lines(terminal_size().columns - 1, time.monotonic())
            self._live = False
            end(self)
            for line in last:
                say(line)

    def seconds_left(self) -> float:
        """Estimate the seconds to the last step; NaN before two steps are done, 0 at the end."""
        if self.done < self.total and not self._durations:
            return math.nan
        return sum(self._durations) / max(len(self._durations), 1) * (self.total - self.done)

    def _fields(self) -> list[str]:
        """Every quantity, in order."""
        values = collections.defaultdict(lambda: math.nan, self._values)
        fields = []
        if "reward/mean" in values or _UPDATE["loss"] not in values:
            c = ""
            if not math.isnan(values["dual/tolerance"]) and self.done > self._measured:
                c = f" (c {number(values['dual/tolerance'], '.3g')})"
            fields = [
                f"reward {number(values['reward/mean'], '.3f')}",
                f"discrepancy {number(values[bounded_metric(self._values)], '.3g')}{c}",
                f"lambda {number(values['dual/multiplier'], '.4f')}",
            ]
        for word, name in _UPDATE.items():
            if name in self._values:
                fields.append(f"{word} {number(values[name], '.3g')}")
        fields += [
            f"{number(values['throughput/tokens_per_second'], ',.0f')} tokens/s",
            f"left {duration(self.seconds_left())}",
        ]
        return fields

    def _evaluation(self) -> str:
        """The scores of the last evaluation."""
        scores = []
        for name, value in sorted(self._values.items()):
            if name.startswith("eval/") and ("/avg@" in name or name.endswith("/loss")):
                label = name.removeprefix("eval/").replace("/", " ")
                scores.append(f"{label} {form_of_score(name, [value], self._values)(value)}")
        return "  ".join(scores)

    def lines(self, columns: int, now: float) -> list[str]:
        """A bar, the quantities with the discrepancy red above c, and the last evaluation."""
        head = f"step {self.done}/{self.total} "
        tail = f" elapsed {duration(self._clock() - self.began)}"
        room = max(0, columns - len(head) - len(tail))
        bar = "━" * round(room * self.done / max(self.total, 1))
        fields = self._fields()
        text = "\n".join(textwrap.wrap("  ".join(fields), columns))
        if "(c " in fields[1]:
            is_over = self._values[bounded_metric(self._values)] > self._values["dual/tolerance"]
            color = _RED if is_over else _GREEN
            text = text.replace(fields[1], colored(fields[1], color))
        return [
            f"{head}{bar:{room}}{tail}",
            *text.splitlines(),
            *textwrap.wrap(self._evaluation(), columns),
        ]

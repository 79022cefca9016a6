"""Results of the parts as markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.timing import median_and_spread, ratio

Found = Mapping[str, Any]
_GIB = 2**30


def table(part: Found) -> str:
    """The table of a part that has found something; empty for one that has not."""
    return _TABLES[part["kind"]](part) if "kind" in part else ""


def _rows(heading: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _limit(found: Found) -> str:
    """'memory, 40% of it': the bound that is nearer, and its share of the measured time."""
    return f"{found['nearer']}, {found['share_of_bound']:.0%}"


def _gib(size: int | None) -> str:
    return "not counted here" if size is None else f"{size / _GIB:.2f} GiB"


def _milliseconds(seconds: list[float]) -> str:
    return median_and_spread([1e3 * each for each in seconds], ".2f")


def _device(found: Found) -> str:
    rows = [
        ("device", f"{found['devices']} x {found['device']}, {found['cores']} cores, jax {found['jax']}"),
        ("memory that JAX may use", _gib(found["memory_bytes"])),
    ]
    if "peak_flops" in found:
        rows += [
            (
                f"peak ({found['chip_figures']})",
                f"{found['peak_flops'] / 1e12:.4g} TFLOP/s, {found['peak_bandwidth'] / 1e9:,.0f} GB/s",
            ),
            (
                "a large bfloat16 product, a copy",
                f"{found['measured_flops'] / 1e12:.4g} TFLOP/s, {found['measured_bandwidth'] / 1e9:,.0f} GB/s",
            ),
        ]
    return _rows(("device", ""), rows)


def _step(found: Found) -> str:
    padding = 1 - found["tokens"] / found["computed_tokens"]
    rows = [
        ("model", f"{found['parameters']:,} parameters, remat {found['remat']}, attention {found['attention']}"),
        (
            "batch",
            f"{found['sequences']} sequences, {found['tokens']:,} tokens, at most "
            f"{found['most_sequences_per_row']} in a row, {found['micro_batches']} micro-batches; padding "
            f"{padding:.0%}",
        ),
        ("compilation", f"{found['compile_seconds']:.0f} s"),
        ("peak memory, by the compiler", _gib(found["predicted_peak_bytes"])),
    ]
    if "seconds" in found:
        rows += [
            (
                "peak memory, measured",
                f"{_gib(found['peak_bytes'])} (before the first step {_gib(found['peak_bytes_before'])})",
            ),
            ("step, s", median_and_spread(found["seconds"])),
            ("tokens/s", median_and_spread(found["tokens_per_second"], ",.0f")),
        ]
    if "share_of_peak" in found:
        rows += [
            ("needed operations", f"{found['needed_flops']:.3e}, {found['flops_per_second'] / 1e12:.4g} TFLOP/s"),
            (f"share of the peak ({found['chip_figures']})", f"{found['share_of_peak']:.1%}"),
            ("compiled over needed operations", f"{found['compiled_over_needed']:.2f}"),
            ("least seconds", ", ".join(f"{name} {value:.3g}" for name, value in found["bounds"].items())),
            ("nearer bound, its share of the time", _limit(found)),
        ]
    if "share_of_goal_rate" in found:
        rows.append(("share of 790 TFLOP/s; goal 50%", f"{found['share_of_goal_rate']:.1%}"))
    lengths = ", ".join(f"{length:,}" for length in found["row_lengths"])
    return _rows(("training step", f"rows of {lengths}"), rows)


def _attention(found: Found) -> str:
    errors = [
        (kernel, *(f"{error:.2e}" for error in of_kernel.values())) for kernel, of_kernel in found["errors"].items()
    ]
    times = [
        (name, kernel, _milliseconds(one["seconds"]), ratio(one["seconds"], kernels["plain"]["seconds"]),
         f"{one['share_of_peak']:.1%}", _limit(one), _gib(one["temporary_bytes"]))
        for name, kernels in found["passes"].items()
        for kernel, one in kernels.items()
    ]  # fmt: skip
    text = (
        f"Attention on {found['rows']} x {found['length']} tokens, {found['sequences_per_row']} in a row, "
        f"{found['heads']} and {found['kv_heads']} heads of {found['head_dim']}: "
        "largest error over the largest value\n\n"
    )
    heading = ("kernel", "output", "query gradient", "key gradient", "value gradient")
    text += _rows(heading, errors)
    heading = ("pass", "kernel", "ms", "over plain", "of peak", "nearer bound, its share", "temporary")
    return f"{text}\n\n{_rows(heading, times)}"


def _engine(found: Found) -> str:
    rows = [
        ("rows", f"{found['rows']}, prompts of {found['prompt_tokens']}, {found['new_tokens']} new tokens"),
        ("push, first call, s", f"{found['push_seconds']:.2f}, {found['first_call_seconds']:.1f}"),
        ("tokens/s", median_and_spread(found["tokens_per_second"], ",.0f")),
        ("peak memory, measured", _gib(found["peak_bytes"])),
    ]
    if "nearer" in found:
        rows += [
            ("decode step's peak, by the compiler", _gib(found["predicted_decode_peak_bytes"])),
            ("weights, cache", f"{_gib(found['weights_bytes'])}, {_gib(found['cache_bytes'])}"),
            (
                "a token of all rows, ms",
                f"{1e3 * found['seconds_per_token_of_all_rows']:.2f}; least "
                + ", ".join(f"{name} {1e3 * value:.3g}" for name, value in found["bounds"].items()),
            ),
            ("nearer bound, its share of the time", _limit(found)),
        ]
    return _rows(("embedded engine", found["precision"]), rows)


def _discrepancy(found: Found) -> str:
    heading = (
        f"{found['tokens']:,} sampled tokens, median p {found['median_probability']:.2g}",
        "mean |p - p'|",
        "mean |log p - log p'|",
        "largest",
    )
    return _rows(
        heading, [(name, *(f"{value:.2e}" for value in pair.values())) for name, pair in found["pairs"].items()]
    )


def _experts(found: Found) -> str:
    rows = [
        (name, key, _milliseconds(one["seconds"]), ratio(one["seconds"], contenders["dense"]["seconds"]),
         f"{one['share_of_peak']:.1%}", f"{one['compiled_over_needed']:.2f}", _limit(one), _gib(one["temporary_bytes"]))
        for name, contenders in found["passes"].items()
        for key, one in contenders.items()
    ]  # fmt: skip
    heading = ("pass", f"{found['experts']} experts", "ms", "over dense", "of peak", "compiled over needed")
    heading += ("nearer bound, its share", "temporary")
    return _rows(heading, rows)


def _run(found: Found) -> str:
    rows = [("settings", " ".join(f"{name}={value}" for name, value in found["settings"].items()) or "its own")]
    if "phases" in found:
        rows += [
            ("steps, s to the end of the first", f"{found['steps']}, {found['first_step_seconds']:.1f}"),
            *((name, median_and_spread(values)) for name, values in found["phases"].items() if values),
            ("held out", ", ".join(f"{value:.1%}" for value in found["held_out"])),
            *((name, ", ".join(f"{value:.4g}" for value in values[:8])) for name, values in found["series"].items()),
        ]
    rows.append(("listening", "; ".join(found["ports"]) or "nothing"))
    return _rows((found["config"], f"{found['seconds']:.0f} s"), rows)


def _torch(found: Found) -> str:
    rows = [
        (name, one["error"], "", "")
        if "error" in one
        else (
            name,
            median_and_spread(one["seconds"]),
            median_and_spread(one["tokens_per_second"], ",.0f"),
            _gib(one.get("peak_bytes")),
        )
        for name, one in found["contenders"].items()
    ]
    return _rows((f"torch {found['versions']}, {found['tokens']:,} tokens", "s", "tokens/s", "peak"), rows)


_TABLES: dict[str, Callable[[Found], str]] = {
    "device": _device,
    "step": _step,
    "attention": _attention,
    "engine": _engine,
    "experts": _experts,
    "discrepancy": _discrepancy,
    "run": _run,
    "torch": _torch,
}


def summary(record: Found) -> str:
    """A line for each part: its figure, its error, or that it was left out."""
    lines = []
    for name, part in record["parts"].items():
        figure = ""
        if rates := part.get("tokens_per_second"):
            figure = f"{statistics.median(rates):,.0f} tokens/s"
        lines.append(f"{name}: {part['error'] or figure or 'done'} ({part['part_seconds']:.0f} s)")
    lines += [
        f"{name}: left out: the {record['budget_s']:g} s were over, or it needs an argument"
        for name in record["left_out"]
    ]
    return "\n".join(lines)

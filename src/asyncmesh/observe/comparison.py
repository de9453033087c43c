"""Several methods on the same work, side by side: as tables, as a plot, as files.

Owns what is shown of a comparison and how it is written; `cases.py` has the figures, `curves.py`
draws them. Invariant: the losses are shown whatever else has to go.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rich import box
from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table

from asyncmesh.observe import curves, style
from asyncmesh.observe.cases import CaseResult, Row, is_number, table

__all__ = [
    "CaseResult",
    "markdown_table",
    "rich_table",
    "table",
    "write_comparison",
    "write_plot",
]

NONE = "–"
TERMINAL_WIDTH, NAME_WIDTH, GAP = 100, 24, 2  # in characters


# -- tables ---------------------------------------------------------------------------------------
class Column(NamedTuple):
    """What a table shows of every row. A loss is shown whatever its width and variety."""

    head: str
    cells: list[str]
    is_loss: bool = False

    @property
    def width(self) -> int:
        """In a terminal, where a head is broken between words and a cell is not."""
        return max(map(cell_len, (*self.head.split(), *self.cells)))

    @property
    def is_empty(self) -> bool:
        return set(self.cells) <= {NONE}

    @property
    def is_alike(self) -> bool:
        return len(self.cells) > 1 and len(set(self.cells)) == 1


def columns(rows: Sequence[Row], baseline: str | None) -> list[Column]:
    """All columns but the names, the most important first."""

    def told(head: str, key: str, tell: Callable[[Any], str], is_loss: bool = False) -> Column:
        values = [getattr(row, key) for row in rows]
        return Column(head, [NONE if v is None else tell(v) for v in values], is_loss)

    grid = [
        Column(key.rpartition(".")[2].replace("_", " "), [f"{row.chosen[key]:g}" for row in rows])
        for key in (rows[0].chosen if rows else {})
    ]
    return [
        Column("final validation loss", [verdict(row) for row in rows], is_loss=True),
        Column("against baseline", [_against(row, baseline) for row in rows]),
        told("best validation loss", "best_val_loss", style.human_loss, is_loss=True),
        *grid,
        told("mean delay (updates)", "mean_delay_updates", "{:.2f}".format),
        told("tokens per second", "tokens_per_second", style.human_count),
        told("busy fraction", "busy_fraction", style.percent),
        told("data axis, per update and replica", "data_bytes_per_update", style.human_bytes),
        told("consensus distance", "consensus_distance", lambda d: f"{100 * d:.2g}%"),
    ]


def verdict(row: Row) -> str:
    """The final loss, or why there is none."""
    if row.diverged:
        return "diverged" if row.runs == 1 else f"diverged ({row.diverged} of {row.runs})"
    if row.final_val_loss is None:
        return NONE
    spread = "" if row.half_range is None else f" ± {row.half_range:.3f}"
    early = f" ({row.interrupted} of {row.runs} interrupted)" if row.interrupted else ""
    return style.human_loss(row.final_val_loss) + spread + early


def _against(row: Row, baseline: str | None) -> str:
    if row.case == baseline:
        return "baseline"
    difference = row.against_baseline_percent
    if difference is None:
        return NONE
    return f"{round(difference, 1) + 0.0:+.1f}%"  # the addition makes 0.0 of -0.0


def _best(rows: Sequence[Row]) -> str | None:
    """The case with the lowest final loss, if there is something to be better than."""
    finals = {row.case: row.final_val_loss for row in rows if row.final_val_loss is not None}
    return min(finals, key=finals.__getitem__) if len(rows) > 1 and finals else None


def markdown_table(cases: Sequence[CaseResult], baseline: str | None) -> str:
    """Every column that says something; the best case in bold."""
    rows = table(cases, baseline)
    shown = [column for column in columns(rows, baseline) if column.is_loss or not column.is_empty]
    best = _best(rows)
    lines = [
        "| case | " + " | ".join(column.head for column in shown) + " |",
        "|---|" + "---:|" * len(shown),
    ]
    for row, cells in zip(rows, zip(*(column.cells for column in shown), strict=True), strict=True):
        told = [row.case.replace("|", "\\|"), *cells]
        if row.case == best:
            told[:2] = [f"**{cell}**" for cell in told[:2]]
        lines.append("| " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def rich_table(
    cases: Sequence[CaseResult], baseline: str | None, width: int = TERMINAL_WIDTH
) -> Table:
    """For a terminal so wide: without what is alike for all, then without the last columns."""
    rows = table(cases, baseline)
    every = columns(rows, baseline)
    shown = [c for c in every if c.is_loss or not (c.is_empty or c.is_alike)]
    longest = max((cell_len(row.case) for row in rows), default=0)
    while True:
        room = width - sum(column.width + GAP for column in shown) - GAP
        if room >= min(longest, NAME_WIDTH) or all(column.is_loss for column in shown):
            break
        shown.remove([column for column in shown if not column.is_loss][-1])
    alike = [
        f"{c.head} {c.cells[0]}" for c in every if c.is_alike and not (c.is_loss or c.is_empty)
    ]
    terminal = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, GAP - 1),
        pad_edge=False,
        caption=f"the same for all: {', '.join(alike)}" if alike else None,
        caption_justify="left",
    )
    terminal.add_column("case", width=max(4, min(longest, room)))
    for column in shown:
        terminal.add_column(column.head, justify="right", width=column.width)
    best = _best(rows)
    for row, cells in zip(rows, zip(*(column.cells for column in shown), strict=True), strict=True):
        terminal.add_row(escape(row.case), *cells, style="bold" if row.case == best else None)
    return terminal


# -- files ----------------------------------------------------------------------------------------
def write_plot(
    cases: Sequence[CaseResult],
    path: Path,
    baseline: str | None = None,
    title: str = "Comparison",
) -> None:
    """The curves and final losses as `path` (PNG), and as SVG beside it."""
    rows = table(cases, baseline)
    figure = curves.draw(
        [_curve(case, row, baseline) for case, row in zip(cases, rows, strict=True)], title
    )
    for ending in (".png", ".svg"):
        style.save(figure, path.with_suffix(ending))


def _curve(case: CaseResult, row: Row, baseline: str | None) -> curves.Curve:
    runs = [
        {point["update"]: point["loss"] for point in run["val_curve"] if is_number(point["loss"])}
        for run in case.runs
    ]
    updates = sorted(set.intersection(*map(set, runs))) if runs else []
    losses = [[run[update] for run in runs] for update in updates]
    return curves.Curve(
        name=case.name,
        updates=updates,
        mean=[fmean(of_runs) for of_runs in losses],
        low=[min(of_runs) for of_runs in losses],
        high=[max(of_runs) for of_runs in losses],
        finals=[run["final_val_loss"] for run in case.runs if is_number(run["final_val_loss"])],
        final=row.final_val_loss,
        verdict=verdict(row),
        against_baseline=_against(row, baseline).replace(NONE, ""),
        is_baseline=case.name == baseline,
    )


def write_comparison(
    folder: Path, cases: Sequence[CaseResult], baseline: str | None, title: str
) -> None:
    """table.md, comparison.json, comparison.png and comparison.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    notes = "Losses are validation losses in nats per token"
    is_virtual = any(run.get("clock") != "real" for case in cases for run in case.runs)
    notes += "; tokens per second are in virtual time." if is_virtual else "."
    if any(len(case.runs) > 1 for case in cases):
        notes += " Every figure is the mean over the seeds, ± half their range."
    text = (
        f"# {title}\n\n{markdown_table(cases, baseline)}\n{notes}\n\n![{title}](comparison.svg)\n"
    )
    (folder / "table.md").write_text(text, encoding="utf-8")
    figures = [
        asdict(row)
        | {"settings": case.settings, "seeds": [{k: run[k] for k in _OF_RUN} for run in case.runs]}
        for case, row in zip(cases, table(cases, baseline), strict=True)
    ]
    content = {"title": title, "baseline": baseline, "cases": figures}
    (folder / "comparison.json").write_text(
        json.dumps(_without_nan(content), indent=2, allow_nan=False) + "\n", encoding="utf-8"
    )
    write_plot(cases, folder / "comparison.png", baseline, title)


_OF_RUN = ("seed", "status", "updates", "tokens", "final_val_loss", "best_val_loss", "val_curve")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

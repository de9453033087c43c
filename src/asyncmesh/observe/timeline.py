"""The timeline: what each worker computed when, in a short time about the middle of a run.

Owns which part of a run is shown and how it is read. Invariant: no more of an events file is parsed
than the part that is shown, and none of it is read beyond that part; a worker's computations are in
its file in the order of their time, because it does one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from asyncmesh.errors import InputFileError
from asyncmesh.observe import style
from asyncmesh.observe.events import Backward, Event, Forward, Update, from_json
from asyncmesh.observe.plots import Worker, said

Span = Forward | Backward | Update

MICROBATCHES_SHOWN = 12
MOST_ROWS = 16  # as many whole replicas as fit, but one at least
SMALLEST_POINTS = 7.0  # of a microbatch's number
TITLE = "What each worker computes"
KINDS: dict[type[Any], tuple[str, str]] = {
    Forward: ("forward", style.SKY),
    Backward: ("backward", style.ORANGE),
    Update: ("update", style.GREEN),
}

_NUMBER = r"(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
_TIMES = re.compile(rf'"start_s": {_NUMBER}, "end_s": {_NUMBER}[,}}]')


# -- reading --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """A short time in a run, the workers to be shown, and what they computed then."""

    from_s: float
    to_s: float
    workers: list[Worker]
    spans: list[Event]


def read_window(folder: Path, workers: Iterable[Worker], microbatches: int) -> Window | None:
    """The middle of a run of so many microbatches a replica; None if nothing is recorded."""
    replicas: dict[int, list[Worker]] = {}
    for worker in sorted(workers):
        if _file_of(folder, worker).is_file():
            replicas.setdefault(worker.replica, []).append(worker)
    if not replicas:
        return None
    first = replicas[min(replicas)]
    whole_replicas = max(1, MOST_ROWS // len(first))
    shown = [
        worker for replica in sorted(replicas)[:whole_replicas] for worker in replicas[replica]
    ]
    from_s, to_s = _about_the_middle(_file_of(folder, first[0]), microbatches)
    spans = [
        span for worker in shown for span in _read_spans(_file_of(folder, worker), from_s, to_s)
    ]
    return Window(from_s, to_s, shown, spans)


def _file_of(folder: Path, worker: Worker) -> Path:
    return folder / f"stage-{worker.stage}-replica-{worker.replica}.jsonl"


def _about_the_middle(path: Path, microbatches: int) -> tuple[float, float]:
    """From the forward of a microbatch at this worker to that of one `MICROBATCHES_SHOWN` later."""
    begin = max(0, microbatches // 2 - MICROBATCHES_SHOWN // 2)
    end = begin + MICROBATCHES_SHOWN
    from_s, to_s = 0.0, 0.0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            times = _TIMES.search(line)
            if times is None:
                continue
            if line.startswith('{"event": "forward"'):
                if f'"microbatch": {begin},' in line:
                    from_s = float(times[1])
                elif f'"microbatch": {end},' in line:
                    return from_s, float(times[1])
            to_s = float(times[2])
    return from_s, to_s


def _read_spans(path: Path, from_s: float, to_s: float) -> Iterator[Event]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            times = _TIMES.search(line)
            if times is None or float(times[2]) < from_s:
                continue
            if float(times[1]) > to_s:
                return
            try:
                yield from_json(line)
            except (ValueError, KeyError, TypeError) as error:
                raise InputFileError(
                    f"{path}: line {number} is no event ({error}); copy the run's events again, or"
                    " move the folder away to have a report without a timeline"
                ) from None


# -- drawing --------------------------------------------------------------------------------------
def timeline(
    events: Iterable[Event], from_s: float, to_s: float, workers: Iterable[Worker] = ()
) -> Figure:
    """Worker × time between two times, one panel a replica.

    A row for every worker that computed something then, and for those of `workers` that did not.
    """
    spans: dict[Worker, list[Span]] = {worker: [] for worker in workers}
    for event in events:
        if isinstance(event, Span) and event.end_s >= from_s and event.start_s <= to_s:
            spans.setdefault(Worker(event.stage, event.replica), []).append(event)
    rows: dict[int, list[Worker]] = {}
    for worker in sorted(spans):
        rows.setdefault(worker.replica, []).append(worker)
    with style.house_style():
        if not any(spans.values()):
            return said(TITLE, "Nothing was computed in this time.")
        row_inches = 0.36 if len(spans) <= MOST_ROWS else 0.2
        figure = style.new_figure(1.2 + row_inches * len(spans) + 0.1 * len(rows))
        unit_s, unit = _unit(to_s - from_s)
        panels = _panels(figure, rows, (to_s - from_s) / unit_s)
        panels[-1].set_xlabel(f"time ({unit}), from {style.human_seconds(from_s)} into the run")
        figure.draw_without_rendering()  # settles the layout: how long a unit is, is known now
        for axes, row_workers in zip(panels, rows.values(), strict=True):
            for row, worker in enumerate(row_workers):
                _draw_spans(axes, row, spans[worker], from_s, unit_s)
    return figure


def _unit(length_s: float) -> tuple[float, str]:
    """In seconds, and its name: the largest of which there are two at least."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if length_s >= 2 * unit[0]), units[-1])


def _panels(figure: Figure, rows: dict[int, list[Worker]], length: float) -> list[Axes]:
    heights = [len(workers) for workers in rows.values()]
    column = figure.subplots(
        len(rows), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    panels: list[Axes] = list(column[:, 0])
    for axes, (replica, workers) in zip(panels, rows.items(), strict=True):
        axes.set_xlim(0.0, length or 1.0)  # computing may be said to take no time
        axes.set_ylim(len(workers) - 0.5, -0.5)
        axes.set_yticks(range(len(workers)), [f"stage {worker.stage}" for worker in workers])
        axes.set_ylabel(f"replica {replica}")
        is_last = axes is panels[-1]
        axes.spines["bottom"].set_visible(is_last)
        axes.tick_params(axis="x", bottom=is_last)
    panels[0].set_title(TITLE)
    panels[0].legend(
        handles=[Patch(color=colour, label=name) for name, colour in KINDS.values()],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=3,
    )
    return panels


def _draw_spans(
    axes: Axes,
    row: int,
    spans: Sequence[Span],
    from_s: float,
    unit_s: float,
) -> None:
    """Boxes in the colour of their kind, with the microbatch's number where it fits."""
    left, right = axes.get_xlim()
    figure_dpi = axes.get_figure(root=True).dpi  # type: ignore[union-attr]
    unit_points = (
        axes.get_window_extent().width / figure_dpi * style.POINTS_PER_INCH / (right - left)
    )
    boxes: dict[str, list[Rectangle]] = {}
    for span in spans:
        start, end = ((moment - from_s) / unit_s for moment in (span.start_s, span.end_s))
        _, colour = KINDS[type(span)]
        width = max(end - start, 1.2 / unit_points)  # what took no time is seen all the same
        boxes.setdefault(colour, []).append(Rectangle((start, row - 0.4), width, 0.8))
        if isinstance(span, Update):
            continue
        number, centre = str(span.microbatch), (start + end) / 2
        size = ((end - start) * unit_points - 2) / (0.64 * len(number))
        if size >= SMALLEST_POINTS and start >= left and end <= right:
            axes.text(
                centre,
                row,
                number,
                color=style.ON_COLOUR,
                fontsize=min(size, style.SMALL_POINTS),
                ha="center",
                va="center_baseline",
            )
    for colour, patches in boxes.items():
        is_update = colour == style.GREEN
        axes.add_collection(
            PatchCollection(
                patches,
                facecolor=colour,
                edgecolor=style.GREEN if is_update else style.PAPER,
                linewidth=0.6,
            )
        )

"""The plots of one run's summary.

Owns what each of them shows and how; the looks are `style.py`'s, the timeline is `timeline.py`'s.
Invariant: what a run does not have (validation, peers, a steady state) gives a plot that says so,
never an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from asyncmesh.observe import style

Summary = Mapping[str, Any]

SMOOTHING_SHARE = 1 / 50  # of a run's updates, to either side
MOST_NAMED_WORKERS = 16  # more bars than that are named by their stage alone
MOST_BARS = 64
BEYOND_PLOTTING = 1e15  # a diverging loss passes through all powers of ten, and NaN is not below


class Worker(NamedTuple):
    stage: int
    replica: int


def worker_of(name: str) -> Worker:
    """ "stage-1-replica-0" → (1, 0): how `summary.json` names workers."""
    _, stage, _, replica = name.split("-")
    return Worker(int(stage), int(replica))


# -- loss -----------------------------------------------------------------------------------------
def loss(summary: Summary) -> Figure:
    """Training loss (raw faint, smoothed) and validation losses over updates."""
    train, validation = _points(summary["train_curve"]), _points(summary["val_curve"])
    with style.house_style():
        if not train and not validation:
            return said("Loss over updates", "No loss was recorded.")
        figure = style.new_figure(3.9)
        axes = figure.subplots()
        axes.set_title("Loss over updates")
        axes.set_xlabel("update")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(axis="y")
        labels = []
        if train:
            updates, losses = zip(*train, strict=True)
            smooth = smoothed(losses, round(len(losses) * SMOOTHING_SHARE))
            axes.plot(updates, losses, color=style.MUTED, linewidth=0.8, alpha=0.4)
            axes.plot(updates, smooth, color=style.MUTED, linewidth=1.4)
            label = f"training {style.human_loss(smooth[-1])}"
            labels.append(style.EndLabel(updates[-1], smooth[-1], label, style.MUTED))
        if validation:
            updates, losses = zip(*validation, strict=True)
            axes.plot(updates, losses, color=style.BLUE, marker="o", markersize=4.5, linewidth=1.6)
            label = f"validation {style.human_loss(losses[-1])}"
            labels.append(style.EndLabel(updates[-1], losses[-1], label, style.BLUE))
        values = [value for _, value in train + validation]
        if min(values) > 0 and max(values) > 50 * min(values):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: style.human_count(loss)))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        style.label_ends(axes, labels)
    return figure


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Mean over the values at most `reach` places away, before and after."""
    sums = [0.0, *accumulate(values)]
    means = []
    for place in range(len(values)):
        first, after = max(0, place - reach), min(len(values), place + reach + 1)
        means.append((sums[after] - sums[first]) / (after - first))
    return means


def _points(curve: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(update, loss), without what is infinite for all practical purposes."""
    return [
        (point["update"], point["loss"])
        for point in curve
        if point["loss"] is not None and abs(point["loss"]) < BEYOND_PLOTTING
    ]


# -- delays ---------------------------------------------------------------------------------------
def delays(summary: Summary) -> Figure:
    """Stage × delay: how many gradients were applied how many updates late, and the mean."""
    histograms = histograms_of(summary)
    with style.house_style():
        if not histograms:
            return said("Delay of gradients, by stage", "No gradient was applied.")
        row_inches = 0.42 if len(histograms) <= 16 else 6.4 / len(histograms)
        figure = style.new_figure(1.25 + row_inches * len(histograms))
        axes = figure.subplots()
        axes.set_title("Delay of gradients, by stage")
        axes.set_xlabel("delay (updates between a gradient's version and its application)")
        most = max(max(histogram) for histogram in histograms.values())
        axes.set_xlim(-0.5, max(most, 3) + 0.5)
        axes.set_ylim(len(histograms) - 0.5, -0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        rows = list(enumerate(histograms))[:: math.ceil(len(histograms) / MOST_NAMED_WORKERS)]
        axes.set_yticks([row for row, _ in rows], [f"stage {stage}" for _, stage in rows])
        is_roomy = most <= 14 and len(histograms) <= 16
        for row, histogram in enumerate(histograms.values()):
            _delay_row(axes, row, histogram, is_roomy)
    return figure


def histograms_of(summary: Summary) -> dict[int, dict[int, int]]:
    """{stage: {delay: microbatches}}, in order."""
    return {
        int(stage): {int(delay): count for delay, count in sorted(histogram.items())}
        for stage, histogram in sorted(summary["delays"].items(), key=lambda item: int(item[0]))
    }


def mean_delay(histogram: Mapping[int, int]) -> float:
    count = sum(histogram.values())
    return sum(delay * times for delay, times in histogram.items()) / count if count else 0.0


def _delay_row(axes: Axes, row: int, histogram: Mapping[int, int], is_roomy: bool) -> None:
    total = sum(histogram.values())
    for delay, count in histogram.items():
        strength = min(1.0, 0.08 + 0.92 * count / total)
        box = Rectangle((delay - 0.47, row - 0.44), 0.94, 0.88, color=style.BLUE, linewidth=0)
        box.set_alpha(strength)
        axes.add_patch(box)
        if is_roomy:
            colour = style.PAPER if strength > 0.55 else style.INK
            axes.text(delay, row, style.human_count(count), color=colour, ha="center", va="center")
    mean = mean_delay(histogram)
    axes.plot(mean, row + 0.4, color=style.VERMILION, marker="^", markersize=9, clip_on=False)
    if is_roomy or row == 0:
        axes.annotate(
            f"▲ mean {mean:.2f}",
            (1, row),
            xytext=(8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            color=style.VERMILION,
            va="center",
            annotation_clip=False,
        )


# -- bars, one a worker ---------------------------------------------------------------------------
class Part(NamedTuple):
    """One colour of stacked bars."""

    name: str
    colour: str
    values: dict[Worker, float]


def busy(summary: Summary) -> Figure:
    """The share of time in which each worker computed."""
    shares = {worker_of(name): share for name, share in summary["busy_fraction"].items()}
    with style.house_style():
        if not any(shares.values()):
            return said("Busy fraction, by worker", "The run ended before its steady state.")
        figure, axes = _worker_bars([Part("computing", style.BLUE, shares)], style.percent)
        axes.set_title("Busy fraction, by worker")
        axes.set_xlabel("share of the steady state spent computing")
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f}%"))
    return figure


def traffic(summary: Summary) -> Figure:
    """Bytes sent by each worker, by axis."""
    sent = {worker_of(name): axes for name, axes in summary["bytes_sent"].items()}
    parts = []
    for axis, colour in (("pipeline", style.BLUE), ("data", style.ORANGE)):
        values = {worker: float(of_worker[axis]) for worker, of_worker in sent.items()}
        name = f"{axis} axis ({style.human_bytes(sum(values.values()))} in all)"
        parts.append(Part(name, colour, values))
    with style.house_style():
        if not any(value for part in parts for value in part.values.values()):
            return said("Bytes sent, by worker", "Nothing was sent.")
        figure, axes = _worker_bars(parts, style.human_bytes)
        axes.set_title("Bytes sent, by worker")
        axes.set_xlabel("bytes sent")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: style.human_bytes(size)))
        handles = [Patch(color=part.colour, label=part.name) for part in parts]
        figure.legend(handles=handles, loc="outside lower right", ncols=2)
    return figure


def _worker_bars(parts: Sequence[Part], told: Callable[[float], str]) -> tuple[Figure, Axes]:
    """Stacked horizontal bars, grouped by stage. If they are too many: one a stage, the mean."""
    if len(parts[0].values) > MOST_BARS:
        parts = [part._replace(values=_mean_over_replicas(part.values)) for part in parts]
    workers = sorted(parts[0].values)
    are_named = len(workers) <= MOST_NAMED_WORKERS
    figure = style.new_figure(1.5 + (0.3 if are_named else 0.12) * max(2, len(workers)))
    axes = figure.subplots()
    axes.grid(axis="x")
    places = [row + 0.5 * worker.stage for row, worker in enumerate(workers)]
    ends = [0.0] * len(workers)
    for part in parts:
        widths = [part.values[worker] for worker in workers]
        axes.barh(places, widths, left=ends, height=0.84, color=part.colour)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_ylim(max(places, default=0.0) + 0.7, -0.7)
    if are_named:
        has_replicas = any(worker.replica for worker in workers)
        names = [f"stage {s}" + f" · replica {r}" * has_replicas for s, r in workers]
        axes.set_yticks(places, names)
        for place, end in zip(places, ends, strict=True):
            axes.annotate(
                told(end), (end, place), xytext=(4, 0), textcoords="offset points", va="center"
            )
    else:
        by_stage: dict[int, list[float]] = {}
        for worker, place in zip(workers, places, strict=True):
            by_stage.setdefault(worker.stage, []).append(place)
        axes.set_ylabel("one bar a replica" if len(workers) > len(by_stage) else "replicas' mean")
        shown = list(by_stage)[:: math.ceil(len(by_stage) / MOST_NAMED_WORKERS)]
        axes.set_yticks([fmean(by_stage[s]) for s in shown], [f"stage {s}" for s in shown])
    return figure, axes


def _mean_over_replicas(values: Mapping[Worker, float]) -> dict[Worker, float]:
    by_stage: dict[int, list[float]] = {}
    for worker, value in values.items():
        by_stage.setdefault(worker.stage, []).append(value)
    return {Worker(stage, 0): fmean(of_replicas) for stage, of_replicas in by_stage.items()}


def said(title: str, sentence: str) -> Figure:
    """A plot of nothing that says why."""
    figure = style.new_figure(1.3)
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_axis_off()
    axes.text(0.0, 0.5, sentence, color=style.MUTED, va="center", transform=axes.transAxes)
    return figure

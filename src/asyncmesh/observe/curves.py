"""The plot of a comparison: loss curves above, final losses as a dot plot below.

Owns what is in view. Invariant: the last part of the curves and the differences at the end are
always visible; what lies outside (the first steep fall, a case far worse than the others) is cut
off above and shown as an arrow at the right edge below, with its number.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from asyncmesh.observe import style

_LINE_INCHES = style.TEXT_POINTS * style.LINE_HEIGHT / style.POINTS_PER_INCH
_GAP_INCHES = 0.12  # between two rows
_LABEL_CHARACTERS, _NAME_CHARACTERS, _TITLE_CHARACTERS = 24, 34, 68
_DASHES = ("-", (0, (5, 2)), (0, (1.2, 1.5)))  # for the second and third round of the colours


@dataclass(frozen=True)
class Curve:
    """One case. `mean`, `low` and `high` over its runs, at the updates that all of them reached."""

    name: str
    updates: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    finals: list[float]  # of each run
    final: float | None  # None: there is none to be proud of
    verdict: str  # in words: the loss, or that it diverged
    against_baseline: str = ""
    is_baseline: bool = False


@dataclass(frozen=True)
class Line:
    """How a curve is drawn."""

    colour: str
    dashes: str | tuple[float, tuple[float, ...]] = "-"
    width: float = 2.0


def draw(curves: Sequence[Curve], title: str) -> Figure:
    """Both panels, or the upper one alone if there is only one case."""
    lines = _lines(curves)
    rows = sorted(curves, key=lambda curve: (curve.final is None, curve.final or 0.0))
    names = {curve.name: textwrap.fill(curve.name, _NAME_CHARACTERS) for curve in curves}
    labels = short_names([curve.name for curve in curves])
    upper = max(3.6, 0.9 + _LINE_INCHES * sum(_lines_of(label) for label in labels.values()))
    lower = 0.9 + sum(_GAP_INCHES + _LINE_INCHES * _lines_of(name) for name in names.values())
    heading = textwrap.fill(title, _TITLE_CHARACTERS)
    top = 0.2 + 1.3 * _LINE_INCHES * _lines_of(heading)
    height = top + upper + (lower if len(curves) > 1 else 0.0)
    with style.house_style():
        figure = style.new_figure(height)  # the title comes first: labels need the final layout
        figure.suptitle(heading, x=0.012, ha="left", fontsize=14, fontweight="bold")
        if len(curves) == 1:
            _draw_curves(figure.subplots(), curves, lines, labels)
        else:
            panels = figure.add_gridspec(2, height_ratios=[upper, lower])
            _draw_curves(figure.add_subfigure(panels[0]).subplots(), curves, lines, labels)
            _draw_finals(figure.add_subfigure(panels[1]).subplots(), rows, lines, names)
    return figure


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Names for the ends of lines: if long, without the words that all begin or end with."""
    words = [name.split() for name in names]
    first, last = 0, 0
    if len(names) > 1 and max(map(len, names)) > _LABEL_CHARACTERS:
        spare = min(map(len, words)) - 1  # a word remains of every name
        while first < spare and len({of_name[first] for of_name in words}) == 1:
            first += 1
        while last < spare - first and len({of_name[-1 - last] for of_name in words}) == 1:
            last += 1
    shortened = [
        " ".join(["…"] * bool(first) + of_name[first : len(of_name) - last] + ["…"] * bool(last))
        for of_name in words
    ]
    return {
        name: textwrap.fill(short, _LABEL_CHARACTERS)
        for name, short in zip(names, shortened, strict=True)
    }


def _lines(curves: Sequence[Curve]) -> dict[str, Line]:
    """The baseline in ink; the others in the colours, and in dashes when these have run out."""
    others = [curve.name for curve in curves if not curve.is_baseline]
    lines = {curve.name: Line(style.INK, width=2.6) for curve in curves if curve.is_baseline}
    for number, name in enumerate(others):
        turn, colour = divmod(number, len(style.SERIES))
        lines[name] = Line(style.SERIES[colour], _DASHES[turn % len(_DASHES)])
    return lines


def _lines_of(text: str) -> int:
    return text.count("\n") + 1


# -- the curves -----------------------------------------------------------------------------------
def _draw_curves(
    axes: Axes, curves: Sequence[Curve], lines: dict[str, Line], labels: dict[str, str]
) -> None:
    axes.set_title("Validation loss over updates", fontsize=style.TEXT_POINTS)
    drawn = [curve for curve in curves if curve.updates]
    if not drawn:
        axes.set_axis_off()
        axes.text(0.0, 0.5, "Nothing was validated.", color=style.MUTED, transform=axes.transAxes)
        return
    axes.set_xlabel("update")
    axes.set_ylabel("validation loss (nats per token)")
    axes.grid(axis="y")
    low, high = curves_in_view(drawn)
    axes.set_ylim(low, high)
    axes.set_xlim(0, max(curve.updates[-1] for curve in drawn))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    ends = []
    for curve in drawn:
        line = lines[curve.name]
        if len(curve.finals) > 1:
            axes.fill_between(
                curve.updates, curve.low, curve.high, color=line.colour, alpha=0.18, linewidth=0
            )
        axes.plot(
            curve.updates,
            curve.mean,
            color=line.colour,
            linestyle=line.dashes,
            linewidth=line.width,
            marker="x" if curve.final is None else None,
            markevery=[-1],
            zorder=3 if curve.is_baseline else 2,
        )
        end = min(curve.mean[-1], high)
        ends.append(style.EndLabel(curve.updates[-1], end, labels[curve.name], line.colour))
    style.label_ends(axes, ends)


def curves_in_view(curves: Sequence[Curve]) -> tuple[float, float]:
    """From below the lowest loss to where half of the cases were after a quarter of the way."""
    values = [value for curve in curves for value in curve.low]
    after_a_quarter = [
        next(
            value
            for update, value in zip(curve.updates, curve.mean, strict=True)
            if update >= curve.updates[-1] / 4
        )
        for curve in curves
    ]
    _, worst = finals_in_view([curve.mean[-1] for curve in curves])
    low, high = min(values), max(median(after_a_quarter), worst)
    margin = 0.05 * (high - low) or 0.01 * abs(high)
    return low - margin, high + margin


# -- the final losses -----------------------------------------------------------------------------
def _draw_finals(
    axes: Axes, rows: Sequence[Curve], lines: dict[str, Line], names: dict[str, str]
) -> None:
    axes.set_title("Final validation loss, best first", fontsize=style.TEXT_POINTS)
    axes.grid(axis="x")
    places, bottom = [], 0.0  # in lines of text, so that a long name has the room it needs
    for curve in rows:
        height = _GAP_INCHES / _LINE_INCHES + _lines_of(names[curve.name])
        places.append(bottom + height / 2)
        bottom += height
    axes.set_ylim(bottom, 0.0)
    axes.set_yticks(places, [names[curve.name] for curve in rows])
    for tick in axes.get_yticklabels():
        tick.set_color(style.INK)
    means = [curve.final for curve in rows if curve.final is not None]
    if means:
        _, worst = finals_in_view(means)
        # A case in view is in view with all its runs.
        of_runs = [f for c in rows if c.final is not None and c.final <= worst for f in c.finals]
        axes.set_xlim(*_widened(min(of_runs), max(of_runs)))
        axes.set_xlabel("validation loss (nats per token)")
    else:
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
    has_baseline = any(curve.is_baseline for curve in rows)
    for curve, place in zip(rows, places, strict=True):
        _draw_final(axes, curve, place, lines[curve.name].colour, has_baseline)
        if curve.is_baseline and curve.final is not None:
            axes.axvline(curve.final, color=style.INK, linewidth=1.2, linestyle=(0, (4, 3)))


def _draw_final(axes: Axes, curve: Curve, place: float, colour: str, has_baseline: bool) -> None:
    """A dot at the mean, a small one for each run, and the numbers in a column on the right."""
    notes = [(curve.against_baseline, 10.0), (curve.verdict, 70.0)]
    for text, offset in notes if has_baseline else [(curve.verdict, 10.0)]:
        axes.annotate(
            text,
            (1, place),
            xytext=(offset, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
    if curve.final is None:
        return
    left, right = axes.get_xlim()
    if curve.final > right:
        axes.plot(right, place, color=colour, marker=">", markersize=9, clip_on=False)
        return
    axes.plot([left, curve.final], [place, place], color=style.RULE, linewidth=1.5, zorder=1)
    if len(curve.finals) > 1:
        many = [place] * len(curve.finals)
        axes.plot(curve.finals, many, color=colour, marker="|", markersize=11, linewidth=2)
    axes.plot(curve.final, place, color=colour, marker="o", markersize=9)


def finals_in_view(finals: Sequence[float]) -> tuple[float, float]:
    """The best, and the worst that is not ten times as far from it as the median is."""
    best = min(finals)
    reach = 10 * (median(finals) - best)
    near = [final for final in finals if final - best <= reach]
    return best, max(near) if len(near) > 1 else max(finals)


def _widened(low: float, high: float) -> tuple[float, float]:
    margin = 0.06 * (high - low) or 0.01 * abs(high)
    return low - margin, high + margin

"""How every figure and page looks: colours, type, numbers as people read them.

Owns the house style and the way from a figure to SVG or PNG. Invariants: no figure touches pyplot
or leaves matplotlib's settings changed; the same figure gives the same bytes; a colour that is
drawn is one of `LIGHT`, so a page can exchange it for its counterpart in `DARK`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Blue to wine can be told apart with any common colour blindness (after Okabe and Ito, and Tol).
LIGHT = {
    "ink": "#1f2933",
    "muted": "#5f6b78",
    "rule": "#dde2e8",
    "paper": "#ffffff",
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "purple": "#cc79a7",
    "orange": "#e69f00",
    "sky": "#56b4e9",
    "wine": "#882255",
}
DARK = LIGHT | {
    "ink": "#e8ebee",
    "muted": "#a3adb8",
    "rule": "#3a424c",
    "paper": "#181c21",
    "blue": "#4aa3df",
    "vermilion": "#f08040",
    "wine": "#d36a9b",
}
INK, MUTED, RULE, PAPER = (LIGHT[name] for name in ("ink", "muted", "rule", "paper"))
BLUE, ORANGE, GREEN, SKY = (LIGHT[name] for name in ("blue", "orange", "green", "sky"))
VERMILION = LIGHT["vermilion"]
SERIES = [LIGHT[name] for name in ("blue", "vermilion", "green", "purple", "orange", "sky", "wine")]
ON_COLOUR = "#101820"  # text on a coloured box: dark on any page, so it has no counterpart

WIDTH_INCHES = 8.0
POINTS_PER_INCH = 72.0
TEXT_POINTS = 11.0
SMALL_POINTS = 9.5
LINE_HEIGHT = 1.35  # of a line of text, relative to its size
LEADER_POINTS = 24.0  # from the end of a line to its label

_SETTINGS: Any = {  # of a type with hundreds of literal keys
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": TEXT_POINTS,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.titlesize": 12.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.unicode_minus": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.facecolor": PAPER,
    "figure.constrained_layout.h_pad": 0.09,
    "figure.constrained_layout.w_pad": 0.09,
    "svg.fonttype": "none",
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw inside of this: the settings are matplotlib's own again afterwards."""
    with mpl.rc_context(_SETTINGS):
        yield


def new_figure(height_inches: float) -> Figure:
    return Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")


def svg(figure: Figure, name: str, description: str) -> str:
    """A figure for a page: its colours are the page's, its name keeps its ids apart."""
    buffer = io.StringIO()
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    text = re.sub(r'<g id="[^"]*"', "<g", text[text.index("<svg") :])
    text = re.sub(r"( ?\d*\.?\d+px) 'DejaVu Sans'[^;\"]*", r"\1 var(--font)", text)
    for colour, value in LIGHT.items():
        text = text.replace(value, f"var(--{colour})")
    described = f'<svg role="img" aria-label="{_escaped(description)}"'
    return text.replace("<svg", described, 1).strip()


def save(figure: Figure, path: Path) -> None:
    """A figure as a file; its ending says the format (png or svg)."""
    is_svg = path.suffix == ".svg"
    with mpl.rc_context({**_SETTINGS, "svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=160, metadata=_NO_METADATA if is_svg else None)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


# -- numbers --------------------------------------------------------------------------------------
def scaled(value: float, units: Sequence[str]) -> str:
    """Three significant digits, in the largest of `units` (steps of 1000) that fits."""
    step = 0
    while abs(value) >= 999.5 and step < len(units) - 1:
        value, step = value / 1000, step + 1
    digits = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
    return f"{digits}\N{NO-BREAK SPACE}{units[step]}" if units[step] else digits


def human_bytes(value: float) -> str:
    return scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def human_count(value: float) -> str:
    return scaled(value, ("", "k", "M", "G", "T")).replace("\N{NO-BREAK SPACE}", "")


def human_seconds(value: float) -> str:
    if 0 < value < 1:
        return scaled(value * 1e6, ("µs", "ms", "s"))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if value >= 2 * size:
            return f"{value / size:.3g}\N{NO-BREAK SPACE}{unit}"
    return f"{value:.3g}\N{NO-BREAK SPACE}s"


def human_loss(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.2e}"


def percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%".replace("100.0", "100")


# -- labels at the ends of lines ------------------------------------------------------------------
@dataclass(frozen=True)
class EndLabel:
    x: float
    y: float
    text: str
    colour: str


def label_ends(axes: Axes, labels: Sequence[EndLabel], size: float = TEXT_POINTS) -> None:
    """Write each label right of its point, moved up or down just as far as none covers another.

    In ink, because not every colour of a line makes a readable text: a leader says whose it is.
    """
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure)  # axes of ours always lie in one
    notes = [
        axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(LEADER_POINTS, 0.0),
            textcoords="offset points",
            fontsize=size,
            va="center",
            annotation_clip=False,
            linespacing=1.05,
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 1.6,
                "relpos": (0.0, 0.5),  # to the middle of the label's left edge
                "patchA": None,  # or it would end at a margin around the label, beside the middle
                "shrinkA": 4.0,
                "shrinkB": 0.0,
            },
        )
        for label in labels
    ]
    figure.draw_without_rendering()  # settles the layout: from here on, places are known
    points_per_pixel = POINTS_PER_INCH / figure.dpi
    frame = axes.get_window_extent()
    wanted = [
        float(axes.transData.transform((label.x, label.y))[1] - frame.y0) * points_per_pixel
        for label in labels
    ]
    heights = [size * LINE_HEIGHT * (label.text.count("\n") + 1) for label in labels]
    for note, place, moved in zip(
        notes, wanted, spread(wanted, heights, frame.height * points_per_pixel), strict=True
    ):
        note.set_position((LEADER_POINTS, moved - place))


def spread(wanted: Sequence[float], heights: Sequence[float], room: float) -> list[float]:
    """Centres as near to `wanted` as boxes of these heights can be, in order and within `room`.

    The least-squares answer: boxes that touch form a block, a block sits at the mean of what its
    boxes want, and blocks that would overlap become one.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    stacked, offsets = 0.0, []
    for i in order:
        offsets.append(stacked + heights[i] / 2)
        stacked += heights[i]
    blocks: list[tuple[float, int]] = []  # the bottom that a block wants, and its size
    for i, offset in zip(order, offsets, strict=True):
        bottom, size = wanted[i] - offset, 1
        while blocks and blocks[-1][0] >= bottom:
            other, count = blocks.pop()
            bottom, size = (other * count + bottom * size) / (count + size), count + size
        blocks.append((bottom, size))
    bottoms = [bottom for bottom, size in blocks for _ in range(size)]
    places = [0.0] * len(wanted)
    for i, bottom, offset in zip(order, bottoms, offsets, strict=True):
        places[i] = min(max(bottom, 0.0), max(room - stacked, 0.0)) + offset
    return places

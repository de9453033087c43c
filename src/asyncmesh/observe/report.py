"""A run's `report.html`: one page that needs nothing but itself.

Owns what is said about a run, and in which order. Invariant: everything on the page comes from the
run's folder (config.toml, events/, summary.json), so it can be written again at any time; nothing
in it is fetched or executed, and text from the folder is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import BaseModel

from asyncmesh.config import Config, default_of
from asyncmesh.configuration import nested, resolved
from asyncmesh.errors import InputFileError
from asyncmesh.observe import plots, style
from asyncmesh.observe.folder import read_config, read_summary
from asyncmesh.observe.timeline import MICROBATCHES_SHOWN, Window, read_window, timeline

Summary = Mapping[str, Any]

NONE = "–"
_NEEDED = [
    "status",
    "mesh",
    "method",
    "seed",
    "updates",
    "tokens",
    "final_val_loss",
    "best_val_loss",
    "val_curve",
    "train_curve",
    "wall_seconds",
    "tokens_per_second",
    "busy_fraction",
    "bytes_sent",
    "delays",
    "rounds",
    "consensus_distance",
    "environment",
]


_MEMORY_KEYS = ("buffers", "buffer_bytes", "optimizer_bytes", "averaging_bytes")
_CHOICES = ("train.updates", "averaging.method", "optimizer.name")  # that defaults depend on


class Headline(NamedTuple):
    """One number of the headline, with what else there is to say about it."""

    name: str
    value: str
    note: str = ""


class Plot(NamedTuple):
    svg: Markup
    caption: str


class Row(NamedTuple):
    cells: tuple[str, ...]
    is_marked: bool = False


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run's folder, and answer its path."""
    summary, config = read_summary(run_folder), read_config(run_folder)
    missing = [key for key in _NEEDED if key not in summary]
    if missing:
        raise InputFileError(
            f"{run_folder / 'summary.json'}: has no {missing[0]}, so it is no summary of a run;"
            " run again to have it written anew"
        )
    window = read_window(
        run_folder / "events",
        map(plots.worker_of, summary["busy_fraction"]),
        summary["updates"] * config.pipeline.accumulation,
    )
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        name=run_folder.resolve().name,
        summary=summary,
        early_end=early_end(summary, config),
        figures=headline(summary),
        plots=list(_plots(summary, window)),
        memory=memory_rows(summary.get("memory", {})),
        settings=settings_rows(config),
        machine=[Row((key, _told(value))) for key, value in summary["environment"].items()],
        light=style.LIGHT,
        dark=style.DARK,
    )
    path = run_folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def early_end(summary: Summary, config: Config) -> str | None:
    """What to know before reading on, if a run did not get to its end."""
    if summary["status"] == "completed":
        return None
    begun = f"after update {summary['updates']} of {config.train.updates}"
    if summary["status"] == "diverged":
        return (
            f"This run diverged {begun}: its training loss was no longer finite. Everything below"
            " is from before. A lower optimizer.learning_rate or a longer"
            " optimizer.warmup_updates may help."
        )
    return f"This run was {summary['status']} {begun}. Everything below is from before."


# -- the headline ---------------------------------------------------------------------------------
def headline(summary: Summary) -> list[Headline]:
    """The numbers that one would ask for first."""
    busy, rounds = list(summary["busy_fraction"].values()), summary["rounds"]
    replicas = [loss for loss in summary.get("final_replica_val_losses", []) if loss is not None]
    virtual_s = summary.get("virtual_seconds")
    is_virtual = virtual_s is not None
    rate, distance = summary["tokens_per_second"], summary["consensus_distance"]
    return [
        Headline(
            f"{'final' if summary['status'] == 'completed' else 'last'} validation loss",
            _loss(summary["final_val_loss"]),
            f"replicas by themselves: {_range(replicas)}" if len(replicas) > 1 else "",
        ),
        Headline("best validation loss", _loss(summary["best_val_loss"]), _best_at(summary)),
        Headline("tokens", style.human_count(summary["tokens"]), f"{summary['updates']:,} updates"),
        Headline(
            "virtual time" if is_virtual else "time",
            style.human_seconds(summary["wall_seconds"] if virtual_s is None else virtual_s),
            f"simulated in {style.human_seconds(summary['wall_seconds'])}" if is_virtual else "",
        ),
        Headline(
            "tokens per virtual second" if is_virtual else "tokens per second",
            style.human_count(rate) if rate else NONE,
        ),
        Headline(
            "busy fraction",
            style.percent(fmean(busy)) if any(busy) else NONE,
            f"mean; the least busy worker: {style.percent(min(busy))}" if any(busy) else "",
        ),
        Headline(
            "rounds merged",
            f"{rounds['completed']:,}",
            f"by all workers together; {rounds['skipped']:,} skipped"
            + (
                f"; mean delay {rounds['mean_delay_updates']:.1f} updates"
                * bool(rounds["completed"])
            ),
        ),
        Headline(
            "consensus distance",
            NONE if distance is None else f"{100 * distance:.2g}%",
            "of the replicas from their mean, relative to its norm",
        ),
    ]


def _loss(value: float | None) -> str:
    return NONE if value is None else style.human_loss(value)


def _range(losses: Iterable[float]) -> str:
    least, *_, most = sorted(losses)
    return style.human_loss(least) + f" to {style.human_loss(most)}" * (least != most)


def _best_at(summary: Summary) -> str:
    best = summary["best_val_loss"]
    at = [point["update"] for point in summary["val_curve"] if point["loss"] == best]
    return f"after update {at[0]:,}" if at else ""


# -- plots ----------------------------------------------------------------------------------------
def _plots(summary: Summary, window: Window | None) -> Iterable[Plot]:
    yield _plot(
        "loss",
        plots.loss(summary),
        "Training loss is the mean of the replicas' microbatches of an update, faint as it was and"
        " dark smoothed; validation loss is that of the mean of the replicas' weights after the"
        " same update.",
    )
    yield _plot(
        "delays",
        plots.delays(summary),
        "How many gradients (one a microbatch) of each stage were applied how many updates after"
        " the version they were computed at: the nearer to 0, the less there is to correct.",
    )
    if window is not None:
        yield _plot(
            "timeline",
            timeline(window.spans, window.from_s, window.to_s, window.workers),
            f"About {MICROBATCHES_SHOWN} microbatches from the middle of the run, each with its"
            " number where it fits: what is blank is a worker that waits, and a microbatch is in"
            " flight at a stage from its forward to its backward there.",
        )
    yield _plot(
        "busy",
        plots.busy(summary),
        "The share of time in which a worker computed, without the filling and draining of the"
        " pipeline: what is missing from 100% is waiting for activations, gradients or means.",
    )
    yield _plot(
        "traffic",
        plots.traffic(summary),
        "What each worker sent: activations and gradients to its neighbouring stages (pipeline"
        " axis), and its share of every round with the other replicas of its stage (data axis).",
    )


def _plot(name: str, figure: Figure, caption: str) -> Plot:
    return Plot(Markup(style.svg(figure, name, caption)), caption)


# -- tables ---------------------------------------------------------------------------------------
def memory_rows(memory: Mapping[str, Mapping[str, int]]) -> list[Row]:
    """stage | replicas that are alike | buffers × bytes | weights | optimiser | averaging | sum"""
    alike: dict[tuple[int, ...], list[int]] = {}
    for worker, of_worker in sorted((plots.worker_of(name), use) for name, use in memory.items()):
        use = [of_worker[key] for key in _MEMORY_KEYS]
        alike.setdefault((worker.stage, *use), []).append(worker.replica)
    rows = []
    for (stage, buffers, size, optimizer, averaging), replicas in alike.items():
        weights = buffers * size
        shares = (weights, optimizer, averaging, weights + optimizer + averaging)
        rows.append(
            Row(
                (
                    str(stage),
                    ", ".join(map(str, replicas)),
                    f"{buffers} × {style.human_bytes(size)}",
                    *map(style.human_bytes, shares),
                )
            )
        )
    return rows


def settings_rows(config: Config) -> list[Row]:
    """setting | value | meaning; marked where it is not the default of the chosen methods."""
    values = resolved(config)
    alike = Config.from_dict(nested({name: values[name] for name in _CHOICES}))
    defaults = resolved(alike) | {name: default_of(name) for name in _CHOICES}
    rows = []
    for name, value in values.items():
        if value is not None:
            section, _, key = name.rpartition(".")
            owner: BaseModel = getattr(config, section) if section else config
            meaning = type(owner).model_fields[key].description or ""
            rows.append(Row((name, _told(value), meaning), value != defaults[name]))
    return rows


def _told(value: Any) -> str:
    """As in TOML, but without digits that only a computer would miss."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, bool):
        return str(value).lower()
    return NONE if value is None else str(value)

"""The cases of a comparison, and what the runs of each came to.

Owns the figures. Invariants: everything is computed from the runs' summaries; a case with a run
that diverged has no final loss, however well its other runs did; what was not measured is None, and
neither 0 nor left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from asyncmesh.errors import ConfigError
from asyncmesh.observe.plots import histograms_of


@dataclass(frozen=True)
class CaseResult:
    """One case of a comparison: the settings that make it, and its run's summary for each seed."""

    name: str
    settings: dict[str, Any]
    runs: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Row:
    """A case's figures: means over its runs, and half the range of the final losses."""

    case: str
    runs: int
    diverged: int
    interrupted: int
    final_val_loss: float | None
    half_range: float | None
    against_baseline_percent: float | None
    best_val_loss: float | None
    chosen: dict[str, Any]
    mean_delay_updates: float | None
    tokens_per_second: float | None
    busy_fraction: float | None
    data_bytes_per_update: float | None
    consensus_distance: float | None


def table(cases: Sequence[CaseResult], baseline: str | None) -> list[Row]:
    """A row for every case, in the order given. `baseline` is the name of a case."""
    names = [case.name for case in cases]
    if baseline is not None and baseline not in names:
        raise ConfigError(
            "--baseline", baseline, "is not one of the cases", f"choose from {', '.join(names)}"
        )
    reference = next((_final(case) for case in cases if case.name == baseline), None)
    keys = chosen_keys(cases)
    return [_row(case, reference, keys) for case in cases]


def chosen_keys(cases: Sequence[CaseResult]) -> list[str]:
    """The settings in which cases differ by a number that all of them give: a common grid's points.

    A number that every case has in its name is told already.
    """
    first, *others = [case.settings for case in cases] or [{}]
    return [
        key
        for key, value in first.items()
        if all(is_number(settings.get(key)) for settings in (first, *others))
        and any(settings[key] != value for settings in others)
        and not all(str(case.settings[key]) in case.name for case in cases)
    ]


def _row(case: CaseResult, reference: float | None, keys: Sequence[str]) -> Row:
    runs, final = case.runs, _final(case)
    losses = [run["final_val_loss"] for run in runs]
    several = final is not None and len(runs) > 1
    return Row(
        case=case.name,
        runs=len(runs),
        diverged=sum(run["status"] == "diverged" for run in runs),
        interrupted=sum(run["status"] == "interrupted" for run in runs),
        final_val_loss=final,
        half_range=(max(losses) - min(losses)) / 2 if several else None,
        against_baseline_percent=100 * (final / reference - 1) if final and reference else None,
        best_val_loss=_mean(run["best_val_loss"] for run in runs),
        chosen={key: case.settings[key] for key in keys},
        mean_delay_updates=_mean(map(_mean_delay, runs)),
        tokens_per_second=_mean(run["tokens_per_second"] for run in runs),
        busy_fraction=_mean(map(_busy, runs)),
        data_bytes_per_update=_mean(map(_data_bytes_per_update, runs)),
        consensus_distance=_mean(run["consensus_distance"] for run in runs),
    )


def _final(case: CaseResult) -> float | None:
    """Mean over the runs; None if one diverged or one has none."""
    losses = [run["final_val_loss"] for run in case.runs]
    if any(run["status"] == "diverged" for run in case.runs) or not all(map(is_number, losses)):
        return None
    return _mean(losses)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else None


def is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(value)


def _mean_delay(run: dict[str, Any]) -> float | None:
    """Over all gradients of all stages, in updates."""
    histograms = histograms_of(run).values()
    count = sum(sum(histogram.values()) for histogram in histograms)
    delayed = sum(delay * times for histogram in histograms for delay, times in histogram.items())
    return delayed / count if count else None


def _busy(run: dict[str, Any]) -> float | None:
    """Over all workers. A run that ended before its steady state has zeros."""
    shares = run["busy_fraction"].values()
    return fmean(shares) if any(shares) else None


def _data_bytes_per_update(run: dict[str, Any]) -> float | None:
    """What a replica sent on the data axis, all its stages together, an update."""
    updates = run["updates"] * run["mesh"]["replicas"]
    sent: int = sum(of_worker["data"] for of_worker in run["bytes_sent"].values())
    return sent / updates if updates else None

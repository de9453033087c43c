"""Comparisons: the figures, the tables, the plot and the files, from summaries alone."""

from __future__ import annotations

import copy
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from asyncmesh.errors import ConfigError
from asyncmesh.observe import curves
from asyncmesh.observe.comparison import (
    CaseResult,
    markdown_table,
    rich_table,
    table,
    write_comparison,
    write_plot,
)


def summary(final: float, seed: int = 0, status: str = "completed", **values: Any) -> Any:
    """The part of a `summary.json` that a comparison reads; the loss halves its way to `final`."""
    updates = values.pop("updates", 100)
    curve = [
        {"update": u, "tokens": 64 * u, "seconds": u / 10, "loss": final + 3.0 * 0.5 ** (u / 10)}
        for u in range(10, updates, 10)
    ]
    curve.append({"update": updates, "tokens": 6400, "seconds": 10.0, "loss": final})
    workers = [f"stage-{s}-replica-{r}" for s in range(2) for r in range(2)]
    return {
        "status": status,
        "mesh": {"stages": 2, "replicas": 2},
        "seed": seed,
        "updates": updates,
        "tokens": 6400,
        "final_val_loss": final,
        "best_val_loss": final - 0.125,
        "val_curve": curve,
        "tokens_per_second": 41_279.0,
        "busy_fraction": dict(zip(workers, (0.25, 0.5, 0.75, 1.0), strict=True)),
        "bytes_sent": {worker: {"pipeline": 10_000, "data": 5_000} for worker in workers},
        "delays": {"0": {"0": 10, "2": 190}, "1": {"0": 200}},
        "consensus_distance": 0.0051,
    } | values


def diverged(seed: int = 0) -> Any:
    nothing: Any = {"final_val_loss": None, "best_val_loss": None, "val_curve": [], "delays": {}}
    ended = {"consensus_distance": None, "tokens_per_second": None, "updates": 0}
    idle = {"busy_fraction": {"stage-0-replica-0": 0.0}}
    return summary(9.0, seed, "diverged") | nothing | ended | idle


def case(name: str, *finals: float, **settings: Any) -> CaseResult:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return CaseResult(name, given, tuple(summary(f, seed) for seed, f in enumerate(finals)))


CASES = [
    case("average all", 2.5, 2.6, optimizer__learning_rate=0.001, averaging__method="sparta"),
    case("momentum", 2.4, 2.44, optimizer__learning_rate=0.003, averaging__method="ours"),
]


def printed(cases: list[CaseResult], baseline: str | None, width: int = 100) -> list[str]:
    written = io.StringIO()
    Console(file=written, width=width).print(rich_table(cases, baseline, width))
    return written.getvalue().splitlines()


# -- figures --------------------------------------------------------------------------------------
def test_the_figures_of_a_case() -> None:
    first, second = table(CASES, "average all")
    assert (first.case, first.runs, first.diverged, first.interrupted) == ("average all", 2, 0, 0)
    assert first.final_val_loss == pytest.approx(2.55)
    assert first.half_range == pytest.approx(0.05)
    assert first.best_val_loss == pytest.approx(2.425)
    assert first.against_baseline_percent == 0.0
    assert second.against_baseline_percent == pytest.approx(100 * (2.42 / 2.55 - 1))
    assert first.mean_delay_updates == pytest.approx(2 * 190 / 400)
    assert first.tokens_per_second == 41_279.0
    assert first.busy_fraction == 0.625
    assert first.data_bytes_per_update == 4 * 5_000 / (100 * 2)
    assert first.consensus_distance == 0.0051


def test_one_seed_has_no_spread_and_no_baseline_no_difference() -> None:
    (row,) = table([case("alone", 2.5)], None)
    assert row.half_range is None
    assert row.against_baseline_percent is None


def test_a_case_with_a_diverged_run_has_no_final_loss() -> None:
    cases = [CASES[0], CaseResult("wild", {}, (summary(2.0), diverged(1), diverged(2)))]
    wild = table(cases, "average all")[1]
    assert (wild.diverged, wild.final_val_loss, wild.half_range) == (2, None, None)
    assert wild.against_baseline_percent is None
    assert wild.best_val_loss == 1.875
    assert wild.busy_fraction == 0.625  # of the run in which it was measured
    assert "diverged (2 of 3)" in markdown_table(cases, "average all")
    only = [CaseResult("wild", {}, (diverged(),))]
    assert "| wild | diverged | – |" in markdown_table(only, None)


def test_a_diverged_baseline_leaves_no_difference() -> None:
    cases = [CaseResult("wild", {}, (diverged(),)), CASES[0]]
    assert table(cases, "wild")[1].against_baseline_percent is None


def test_an_interrupted_run_is_told() -> None:
    runs = (summary(2.5), summary(2.7, 1, "interrupted"))
    told = markdown_table([CaseResult("stopped", {}, runs)], None)
    assert "2.600 ± 0.100 (1 of 2 interrupted)" in told


def test_an_unknown_baseline_is_an_error_that_names_the_cases() -> None:
    with pytest.raises(ConfigError, match="choose from average all, momentum"):
        table(CASES, "sparta")


def test_the_points_of_a_grid_are_chosen_numbers() -> None:
    assert [row.chosen for row in table(CASES, None)] == [
        {"optimizer.learning_rate": 0.001},
        {"optimizer.learning_rate": 0.003},
    ]
    alike = [case(name, 2.5, optimizer__learning_rate=0.01) for name in "ab"]
    assert table(alike, None)[0].chosen == {}
    lacking = [case("a", 2.5, averaging__delay=3), case("b", 2.5)]
    assert table(lacking, None)[0].chosen == {}
    in_the_name = [case(f"delay {n}", 2.5, averaging__delay=n) for n in (3, 4)]
    assert table(in_the_name, None)[0].chosen == {}


# -- tables ---------------------------------------------------------------------------------------
def test_the_markdown_table() -> None:
    head, rule, first, second = markdown_table(CASES, "average all").splitlines()
    heads = [cell.strip() for cell in head.strip("|").split("|")]
    assert heads == [
        "case",
        "final validation loss",
        "against baseline",
        "best validation loss",
        "learning rate",
        "mean delay (updates)",
        "tokens per second",
        "busy fraction",
        "data axis, per update and replica",
        "consensus distance",
    ]
    assert rule == "|---|" + "---:|" * 9
    assert first.replace("\N{NO-BREAK SPACE}", " ") == (
        "| average all | 2.550 ± 0.050 | baseline | 2.425 | 0.001 | 0.95 | 41.3k | 62.5% | 100 B"
        " | 0.51% |"
    )
    assert second.startswith("| **momentum** | **2.420 ± 0.020** | -5.1% | 2.295 | 0.003 |")


def test_markdown_leaves_out_only_what_is_empty() -> None:
    text = markdown_table([case("a|b", 2.5)], None)
    assert "against baseline" not in text
    assert "mean delay" in text
    assert "| a\\|b | 2.500 |" in text


def test_no_difference_has_no_minus() -> None:
    assert "| +0.0% |" in markdown_table([case("a", 2.5), case("b", 2.4999)], "a")


def test_the_terminal_table_leaves_out_what_is_alike_but_no_loss() -> None:
    lines = printed([case("a", 2.5), case("b", 2.5)], None)
    heads = " ".join(lines[:5])
    assert heads.count("validation") == 2
    assert "busy" not in heads
    assert "tokens" not in heads
    told = " ".join(" ".join(lines).split())
    assert "the same for all: mean delay (updates) 0.95," in told
    assert "busy fraction 62.5%" in told


@pytest.mark.parametrize("width", [100, 80])
@pytest.mark.parametrize("name", ["case {}", "a very long name, with k = 8 and 100% of it [{}]"])
def test_the_terminal_table_fits(name: str, width: int) -> None:
    cases = [case(name.format(n), 2.5 + n, 2.6, optimizer__learning_rate=n) for n in range(8)]
    for number, one in enumerate(cases):
        for run in one.runs:
            run["busy_fraction"] = {"stage-0-replica-0": 0.9 - number / 10}
            run["consensus_distance"] = number / 100
            run["tokens_per_second"] = 1234.5 * (number + 1)
    lines = printed(cases, cases[0].name, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for row in table(cases, cases[0].name):
        assert f"{row.final_val_loss:.3f} ± {row.half_range:.3f}" in text
        assert f"{row.best_val_loss:.3f}" in text
    assert "…" not in text
    assert name.format(7).split()[-1] in text


def test_the_best_case_stands_out() -> None:
    assert [row.style for row in rich_table(CASES, None).rows] == [None, "bold"]
    assert [row.style for row in rich_table(CASES[:1], None).rows] == [None]


# -- the plot -------------------------------------------------------------------------------------
def curve(name: str, final: float | None, *losses: float, **values: Any) -> curves.Curve:
    updates = [10 * (n + 1) for n in range(len(losses))]
    mean = list(losses)
    finals = [] if final is None else [final]
    told = "diverged" if final is None else f"{final:.3f}"
    return curves.Curve(name, updates, mean, mean, mean, finals, final, told, **values)


def labels_of(figure: Figure) -> dict[str, Any]:
    figure.draw_without_rendering()
    axes = figure.subfigs[0].axes[0]
    # An annotation's own extent includes its leader.
    return {text.get_text(): Text.get_window_extent(text) for text in axes.texts}


def test_the_labels_at_the_ends_do_not_overlap() -> None:
    cases = [curve(f"case {n}", 2.5 + n / 1e3, 5.0, 3.0, 2.5 + n / 1e3) for n in range(10)]
    figure = curves.draw(cases, "Ten that end alike")
    boxes = sorted(labels_of(figure).values(), key=lambda box: box.y0)
    assert len(boxes) == 10
    for lower, higher in itertools.pairwise(boxes):
        assert higher.y0 >= lower.y1 - 1.0
    page = figure.get_window_extent()
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 for box in boxes)
    assert all(page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)


def test_final_losses_are_dots_best_first_with_the_baseline_as_a_line() -> None:
    cases = [
        curve("worst", 2.9, 5.0, 2.9, against_baseline="+16.0%"),
        curve("base", 2.5, 5.0, 2.5, is_baseline=True, against_baseline="baseline"),
        curve("best", 2.4, 5.0, 2.4, against_baseline="-4.0%"),
        curve("wild", None),
    ]
    figure = curves.draw(cases, "Title")
    below = figure.subfigs[1].axes[0]
    assert [t.get_text() for t in below.get_yticklabels()] == ["best", "base", "worst", "wild"]
    dots = [line.get_xdata() for line in below.lines if line.get_marker() == "o"]
    assert [float(np.asarray(x)[0]) for x in dots] == [2.4, 2.5, 2.9]
    (baseline,) = [line for line in below.lines if list(np.asarray(line.get_ydata())) == [0, 1]]
    assert list(np.asarray(baseline.get_xdata())) == [2.5, 2.5]
    told = [text.get_text() for text in below.texts]
    assert {"-4.0%", "2.400", "baseline", "2.500", "+16.0%", "2.900", "diverged"} <= set(told)


def test_a_case_in_view_is_in_view_with_all_its_seeds() -> None:
    cases = [curve(f"case {n}", 2.5 + n / 50, 5.0, 3.0, 2.5 + n / 50) for n in range(3)]
    spread = replace(cases[2], finals=[2.3, 2.5, 2.9])  # of its 2.54
    below = curves.draw([*cases[:2], spread], "Title").subfigs[1].axes[0]
    left, right = below.get_xlim()
    assert left < 2.3
    assert right > 2.9


def test_a_far_worse_case_does_not_hide_the_differences_of_the_others() -> None:
    cases = [curve(f"case {n}", 2.5 + n / 50, 5.0, 3.0, 2.5 + n / 50) for n in range(4)]
    cases.append(curve("lost", 9.0, 9.5, 9.2, 9.0))
    assert curves.finals_in_view([c.finals[0] for c in cases]) == (2.5, 2.56)
    low, high = curves.curves_in_view(cases)
    assert low < 2.5
    assert 3.0 < high < 6.0
    below = curves.draw(cases, "Title").subfigs[1].axes[0]
    arrows = [line for line in below.lines if line.get_marker() == ">"]
    assert len(arrows) == 1
    assert "9.000" in [text.get_text() for text in below.texts]


def test_long_names_are_shortened_where_they_are_alike_and_only_there() -> None:
    names = [f"asynchronous pipeline, averaged by {how} on text" for how in ("EMA", "delta")]
    assert list(curves.short_names(names).values()) == ["… EMA …", "… delta …"]
    assert curves.short_names(["a b", "a c"]) == {"a b": "a b", "a c": "a c"}
    same = ["one very long name for a case", "one very long name for a case too"]
    shortened = list(curves.short_names(same).values())
    assert len(set(shortened)) == 2
    alone = curves.short_names(["one very long name for a single case"])
    assert list(alone.values()) == ["one very long name for a\nsingle case"]


def test_a_band_spans_the_seeds_and_a_curve_ends_where_all_runs_have_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[curves.Curve] = []
    draw = curves.draw

    def spy(given: list[curves.Curve], title: str) -> Figure:
        drawn.extend(given)
        return draw(given, title)

    monkeypatch.setattr(curves, "draw", spy)
    runs = (summary(2.5), summary(2.7, 1), summary(2.6, 2, updates=60))
    write_plot([CaseResult("seeds", {}, runs)], tmp_path / "plot.png")
    (only,) = drawn
    assert only.updates == [10, 20, 30, 40, 50, 60]
    at_30 = [run["val_curve"][2]["loss"] for run in runs]
    assert only.mean[2] == pytest.approx(fmean(at_30))
    assert (only.low[2], only.high[2]) == (min(at_30), max(at_30))
    assert only.finals == [2.5, 2.7, 2.6]


@pytest.mark.parametrize("count", [1, 3])
def test_cases_that_all_diverged_are_drawn_as_such(count: int, tmp_path: Path) -> None:
    cases = [CaseResult(f"wild {n}", {}, (diverged(),)) for n in range(count)]
    write_plot(cases, tmp_path / "plot.png", "wild 0", "All lost")
    svg = ElementTree.parse(tmp_path / "plot.svg").getroot()
    text = ["".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text")]
    assert "Nothing was validated." in text
    assert text.count("diverged") == (count if count > 1 else 0)


# -- files ----------------------------------------------------------------------------------------
def test_the_files_of_a_comparison(tmp_path: Path) -> None:
    cases = [*CASES, CaseResult("wild", {"averaging.fraction": 0.5}, (diverged(), diverged(1)))]
    lost = copy.deepcopy(cases[0].runs[0])
    lost["val_curve"][0]["loss"] = float("nan")
    cases[0] = CaseResult(cases[0].name, cases[0].settings, (lost, cases[0].runs[1]))
    folder = tmp_path / "new" / "comparison"
    write_comparison(folder, cases, "average all", "$p$ of 5% & <more>")

    text = (folder / "table.md").read_text(encoding="utf-8")
    assert text.startswith("# $p$ of 5% & <more>\n\n| case |")
    assert markdown_table(cases, "average all") in text
    assert "half their range" in text

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    content = json.loads(
        (folder / "comparison.json").read_text(encoding="utf-8"), parse_constant=no_constant
    )
    assert (content["title"], content["baseline"]) == ("$p$ of 5% & <more>", "average all")
    first, second, wild = content["cases"]
    assert second["final_val_loss"] == pytest.approx(2.42)
    assert second["settings"]["optimizer.learning_rate"] == 0.003
    assert [run["final_val_loss"] for run in second["seeds"]] == [2.4, 2.44]
    assert [run["seed"] for run in second["seeds"]] == [0, 1]
    assert first["seeds"][0]["val_curve"][0]["loss"] is None
    assert (wild["diverged"], wild["final_val_loss"]) == (2, None)

    image = matplotlib.image.imread(folder / "comparison.png")
    assert image.shape[1] == 1280
    assert image[..., :3].std() > 0.05
    svg = ElementTree.parse(folder / "comparison.svg").getroot()
    words = ["".join(e.itertext()) for e in svg.iter() if e.tag.endswith("text")]
    assert {"$p$ of 5% & <more>", "momentum", "2.420 ± 0.020", "diverged (2 of 2)"} <= set(words)


def test_one_seed_needs_no_word_about_seeds(tmp_path: Path) -> None:
    write_comparison(tmp_path, [case("alone", 2.5)], None, "Alone")
    assert "seeds" not in (tmp_path / "table.md").read_text(encoding="utf-8")

"""`compare`: several methods on the same work.

Owns what a comparison consists of (cases × grid × seeds) and the running of it. What is equal is
equal by construction: all cases start from the same settings, so model, initial weights, data order
and number of tokens only differ where a case says so. A grid gives every case its own best setting
from common choices. Invariant: every run is checked before the first one begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from asyncmesh.cli.compare_runs import (
    RunTask,
    default_jobs,
    run_on_real_meshes,
    run_on_virtual_meshes,
)
from asyncmesh.cli.settings import (
    PASS_SETTINGS_ON,
    Preset,
    PrintConfig,
    Settings,
    print_config,
    read,
    the_file,
)
from asyncmesh.configuration import (
    Layers,
    Nested,
    flattened,
    parse_assignment,
    read_preset,
    read_toml,
)
from asyncmesh.errors import AsyncMeshError, ConfigError

Assignments = dict[str, Any]


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=PASS_SETTINGS_ON)(compare)


@dataclass(frozen=True)
class Plan:
    """The cases by name, the settings to choose from for each, and the seeds."""

    title: str
    cases: Mapping[str, Assignments]
    grid: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    baseline: str | None

    def points(self) -> list[Assignments]:
        """Every combination of the grid (one, empty, without a grid)."""
        return [
            dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())
        ]


def compare(
    settings: Settings = None,
    preset: Preset = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help='A method: --case "NAME: key=value key=value". Can be repeated.'),
    ] = None,
    over: Annotated[
        list[str] | None,
        typer.Option(help="A case for every value: --over averaging.method=sparta,async-ema."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="Values of which every case gets its best: --grid key=1e-3,2e-3."),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Comma-separated; default: the setting seed.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="The case that others refer to.")] = None,
    only: Annotated[str | None, typer.Option(help="Run cases whose name has this in it.")] = None,
    output: Annotated[Path | None, typer.Option(help="Default: comparisons/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    real: Annotated[
        bool, typer.Option("--real", help="On a real mesh of processes, one run at a time.")
    ] = False,
    show_config: PrintConfig = False,
) -> None:
    """Run several methods on the same work; writes a table and a plot."""
    path, layers = the_file(settings), read(settings, preset)
    config = layers.config()  # a mistake in the common settings is told before anything else
    _check_own_business("", layers.values, ["output_dir"])
    if show_config:
        return print_config(layers, config)
    given = _given(preset, path)
    given = given.model_copy(update={"seeds": given.seeds or [config.seed]})
    plan = _plan(given, case or [], over or [], grid or [], seeds, baseline, only)
    folder = output or Path("comparisons") / (path.stem if path else preset or "compare")
    tasks = list(_tasks(plan, layers, folder))
    if real:
        summaries = run_on_real_meshes(tasks)
    else:
        summaries = run_on_virtual_meshes(tasks, jobs or default_jobs(tasks[0].config))
    return _present(plan, summaries, folder)


class CompareTable(BaseModel):
    """The [compare] table of a file or a preset."""

    model_config = ConfigDict(extra="forbid", strict=True)
    title: str = "Comparison"
    baseline: str | None = None
    seeds: list[int] = []  # none: the configuration's own
    grid: dict[str, list[Any]] = {}
    cases: dict[str, Nested] = {}


def _given(preset: str | None, path: Path | None) -> CompareTable:
    """The [compare] table of the preset and the file, the file's over the preset's."""
    given: Nested = dict(read_preset(preset).get("compare", {})) if preset else {}
    of_file = read_toml(path).get("compare", {}) if path else {}
    if not isinstance(of_file, Mapping):
        raise ConfigError("compare", of_file, "must be a table", "write [compare] over its keys")
    given |= of_file
    try:
        return CompareTable.model_validate(given)
    except ValidationError as error:
        detail = error.errors()[0]
        setting = ".".join(["compare", *map(str, detail["loc"])])
        keys = ", ".join(CompareTable.model_fields)
        raise ConfigError(
            setting,
            detail["input"],
            detail["msg"].replace("Input should be", "must be"),
            f"a [compare] table has {keys}",
        ) from None


# What a comparison sets for each of its runs, and how it is told.
_OWN_BUSINESS = {"seed": "use --seeds", "output_dir": "use --output for all of them"}


def _check_own_business(where: str, values: Mapping[str, Any], own: Iterable[str]) -> None:
    """No setting that would be overwritten without a word."""
    for setting in own:
        if setting in values:
            raise ConfigError(
                f"{where}{setting}",
                values[setting],
                "is the comparison's own business",
                _OWN_BUSINESS[setting],
            )


def _plan(
    given: CompareTable,
    case: list[str],
    over: list[str],
    grid: list[str],
    seeds: str | None,
    baseline: str | None,
    only: str | None,
) -> Plan:
    cases: dict[str, Assignments] = {n: flattened(values) for n, values in given.cases.items()}
    for name, settings in map(_parse_case, case):
        if name in cases:
            raise ConfigError("--case", name, "is there already", "give every case its own name")
        cases[name] = settings
    cases = _crossed(cases, [_parse_choices(text, "--over") for text in over])
    if only is not None:
        cases = {name: values for name, values in cases.items() if only in name}
    if not cases:
        raise ConfigError(
            "--only" if only else "--case",
            only,
            "leaves nothing to compare",
            'give cases, e.g. --over averaging.method=sparta,async-ema or --preset "data-axis"',
        )
    _check_names(cases)
    for name, values in cases.items():
        _check_own_business(f"case {name}: ", values, _OWN_BUSINESS)
    baseline = baseline or given.baseline
    if baseline is not None and baseline not in cases:
        if only is None:
            raise ConfigError(
                "--baseline", baseline, "is not one of the cases", f"choose from {', '.join(cases)}"
            )
        baseline = None
    chosen = given.grid | dict(_parse_choices(text, "--grid") for text in grid)
    _check_own_business("grid: ", chosen, _OWN_BUSINESS)
    return Plan(given.title, cases, chosen, _parse_seeds(seeds, given.seeds), baseline)


def _check_names(cases: Mapping[str, Assignments]) -> None:
    """Two cases may not share a folder."""
    folders: dict[str, str] = {}
    for name in cases:
        other = folders.setdefault(_slug(name), name)
        if other != name:
            raise ConfigError(
                "--case", name, f'would share a folder with "{other}"', "choose another name"
            )


def _slug(name: str) -> str:
    """A case's folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _parse_case(text: str) -> tuple[str, Assignments]:
    name, colon, rest = text.partition(":")
    if not colon:
        raise ConfigError(
            "--case", text, "has no colon", 'write --case "NAME: key=value key=value"'
        )
    return name.strip(), dict(parse_assignment(part) for part in rest.split())


def _parse_choices(text: str, option: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(option, text, "has no values", f"write {option} section.key=A,B,C")
    return name, [parse_assignment(f"{name}={value}")[1] for value in values.split(",")]


def _parse_seeds(text: str | None, given: list[int]) -> list[int]:
    try:
        seeds = given if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError("--seeds", text, "must be whole numbers", "try --seeds=0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise ConfigError("--seeds", text, "has a seed twice", "give different ones")
    return seeds


def _crossed(
    cases: dict[str, Assignments], overs: list[tuple[str, list[Any]]]
) -> dict[str, Assignments]:
    """Every case with every combination of the values of --over."""
    for name, values in overs:
        cases = {
            f"{case}, {value}" if case else str(value): {**settings, name: value}
            for case, settings in (cases or {"": {}}).items()
            for value in values
        }
    return cases


def _tasks(plan: Plan, layers: Layers, folder: Path) -> Iterator[RunTask]:
    """All runs, checked before the first one begins."""
    for name, settings in plan.cases.items():
        for number, point in enumerate(plan.points()):
            for seed in plan.seeds:
                mine = Layers(dict(layers.values), dict(layers.origin))
                mine.add(settings, f"case {name}")
                mine.add(point, "grid")
                mine.add({"seed": seed}, "seeds")
                run = folder / _slug(name) / f"seed-{seed}"
                if plan.grid:
                    chosen = "_".join(f"{k.rpartition('.')[2]}-{v}" for k, v in point.items())
                    run = run.with_name(f"{chosen}_seed-{seed}")
                yield RunTask(name, number, seed, mine.config(), run)


def _present(
    plan: Plan,
    summaries: Mapping[tuple[str, int, int], dict[str, Any]],
    folder: Path,
) -> None:
    from asyncmesh.cli.console import console
    from asyncmesh.observe.comparison import CaseResult, rich_table, write_comparison

    results = []
    for name, settings in plan.cases.items():
        by_point = [
            tuple(summaries[name, number, seed] for seed in plan.seeds)
            for number in range(len(plan.points()))
        ]
        best = min(range(len(by_point)), key=lambda number: _mean_loss(by_point[number]))
        chosen = {**settings, **plan.points()[best]}
        results.append(CaseResult(name, chosen, by_point[best]))
    write_comparison(folder, results, plan.baseline, plan.title)
    console.print(rich_table(results, plan.baseline, console.width))
    print(f"table, figures and plot: {folder}")
    if all(run["status"] == "diverged" for result in results for run in result.runs):
        raise AsyncMeshError("every run diverged; lower optimizer.learning_rate")


def _mean_loss(runs: Sequence[dict[str, Any]]) -> float:
    """For choosing from the grid: a run that diverged is worse than any other."""
    losses = [run["final_val_loss"] for run in runs if run["status"] == "completed"]
    if len(losses) < len(runs) or None in losses:
        return float("inf")
    return float(sum(losses) / len(losses))

"""`inspect`: look at a schedule, the memory or the split of a run before (or after) running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncmesh.cli.settings import PASS_SETTINGS_ON, Preset, Settings, read

app = typer.Typer(help="Look at a schedule, the memory or the split of a model.")


@app.command()
def schedule(
    stages: Annotated[int, typer.Option(min=1)] = 4,
    accumulation: Annotated[int, typer.Option(min=1)] = 1,
    schedule: Annotated[str, typer.Option(help="async, 1f1b or gpipe")] = "async",
    order: Annotated[str, typer.Option(help="strict or eager (async only)")] = "strict",
    extra_depth: Annotated[int, typer.Option(min=0)] = 0,
    updates: Annotated[int | None, typer.Option(min=1, help="default: as fill 100 slots")] = None,
    forward: Annotated[int, typer.Option(min=1, help="slots that a forward takes")] = 1,
    backward: Annotated[int, typer.Option(min=1, help="slots that a backward takes")] = 1,
) -> None:
    """Print a schedule as a grid: workers down, time across."""
    from asyncmesh.config import Config
    from asyncmesh.simulator.grid import schedule_grid

    fitting = max(2, min(6, -(-(24 // (forward + backward)) // accumulation)))
    config = Config.from_dict(
        {
            "train": {"updates": updates or fitting},
            "mesh": {"stages": stages, "replicas": 1},
            "pipeline": {
                "schedule": schedule,
                "order": order,
                "accumulation": accumulation,
                "extra_depth": extra_depth,
            },
            "compute": {
                "forward_ms": 1000.0 * forward,
                "backward_ms": 1000.0 * backward,
                "update_ms": 0.0,
            },
            "optimizer": {"warmup_updates": 0},
        }
    )
    print(schedule_grid(config))


@app.command(context_settings=PASS_SETTINGS_ON)
def memory(settings: Settings = None, preset: Preset = None) -> None:
    """Weight versions that a run will hold; for a finished run's folder, also what it held."""
    from rich.table import Table

    from asyncmesh.cli.console import console
    from asyncmesh.data.sources import load_source
    from asyncmesh.errors import ConfigError
    from asyncmesh.observe.folder import read_config, read_summary
    from asyncmesh.simulator.language_model import stage_sizes, weights_width
    from asyncmesh.simulator.memory import predict

    measured: dict[str, dict[str, int]] = {}
    if settings and Path(settings[0]).is_dir():
        if len(settings) > 1 or preset is not None:
            raise ConfigError(
                "inspect memory",
                " ".join(settings),
                "a finished run's settings are its own",
                "give the folder alone, or settings without a folder",
            )
        config = read_config(Path(settings[0]))
        measured = read_summary(Path(settings[0]))["memory"]
    else:
        config = read(settings, preset).config()
    vocab = config.model.vocab or load_source(config.data.source).needed_vocab
    table = Table("stage", "coordinates", "in flight", "versions", "weights", "averaging", box=None)
    for stage in predict(config, stage_sizes(config, vocab), weights_width(config)):
        said = [
            str(stage.buffers),
            _megabytes(stage.weight_bytes),
            _megabytes(stage.averaging_bytes),
        ]
        held = measured.get(f"stage-{stage.stage}-replica-0")
        if held:
            found = [
                str(held["buffers"]),
                _megabytes(held["buffers"] * held["buffer_bytes"]),
                _megabytes(held["averaging_bytes"]),
            ]
            said = [f"{one} / {other}" for one, other in zip(said, found, strict=True)]
        table.add_row(str(stage.stage), f"{stage.coordinates:,}", str(stage.in_flight), *said)
    console.print(table)
    print("a worker of each stage; versions: full copies of its weights that are live at once")
    if measured:
        print("predicted / measured; measured is the most there ever was, at replica 0")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


@app.command(context_settings=PASS_SETTINGS_ON)
def stages(settings: Settings = None, preset: Preset = None) -> None:
    """How the model is cut into stages, and what each costs."""
    from rich.table import Table

    from asyncmesh.cli.console import console
    from asyncmesh.data.sources import load_source
    from asyncmesh.model.splitting import split, stage_costs
    from asyncmesh.simulator.language_model import stage_sizes

    config = read(settings, preset).config()
    vocab = config.model.vocab or load_source(config.data.source).needed_vocab
    names = ["embedding", *(f"block {i}" for i in range(config.model.layers)), "head"]
    costs = stage_costs(config.model, vocab, config.mesh.stages)
    sizes = stage_sizes(config, vocab)
    table = Table("stage", "components", "coordinates", "cost (mean 1)", box=None)
    for stage, part in enumerate(split(config.model, vocab, config.mesh.stages)):
        held = names[part.start] if len(part) == 1 else f"{names[part[0]]} to {names[part[-1]]}"
        table.add_row(str(stage), held, f"{sizes.coordinates[stage]:,}", f"{costs[stage]:.3f}")
    console.print(table)

"""How commands take settings: `[CONFIG.toml] [--section.key=value ...]`, presets, `--print-config`.

Owns the reading of that part of a command line. Invariant: everything that is not a file is a
setting, and a setting that does not exist is an error, never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncmesh.config import Config, setting_names
from asyncmesh.configuration import Layers, collect, resolved
from asyncmesh.errors import AsyncMeshError

# Settings are unknown options to the parser, so it must hand them over as they are.
PASS_SETTINGS_ON = {"ignore_unknown_options": True}

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [--section.key=value]...",
        help="A TOML file, and settings that go over it.",
        show_default=False,
    ),
]
Preset = Annotated[
    str | None, typer.Option(help="Settings that come with the package; a file goes over them.")
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Show every setting and where it is from, and stop.")
]


def read(settings: list[str] | None, preset: str | None) -> Layers:
    """All layers of a command line."""
    _, assignments = _sorted_out(settings or [])
    return collect(preset, the_file(settings), assignments)


def the_file(settings: list[str] | None) -> Path | None:
    """The configuration file of a command line, if there is one."""
    files, _ = _sorted_out(settings or [])
    if len(files) > 1:
        raise AsyncMeshError(f"{files[1]}: only one configuration file can be given; merge them")
    return Path(files[0]) if files else None


def _sorted_out(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files and assignments; `--key value` is joined to `--key=value`."""
    files, assignments, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            files.append(argument)
        elif _needs_value(argument) and rest and not rest[0].startswith("--"):
            assignments.append(f"{argument}={rest.pop(0)}")
        else:
            assignments.append(argument)
    return files, assignments


def _needs_value(argument: str) -> bool:
    return "=" not in argument and argument[2:].replace("-", "_") in setting_names()


def print_config(layers: Layers, config: Config) -> None:
    """Every setting as TOML, with a comment that says where its value came from."""
    import tomli_w

    section = ""
    for name, value in sorted(resolved(config).items(), key=lambda item: "." in item[0]):
        table, _, key = name.rpartition(".")
        if table != section:
            section = table
            print(f"\n[{table}]")
        origin = layers.origin.get(name, "default")
        shown = f"# {key} is not set" if value is None else tomli_w.dumps({key: value}).strip()
        print(f"{' '.join(shown.split()):<44} # {origin}")

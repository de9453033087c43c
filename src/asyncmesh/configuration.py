"""Where settings come from: defaults, a preset, a file, the command line, in rising order.

Owns the layering and, for every value, the name of the layer that set it. Invariant: a setting is
spelt `section.key` everywhere, and a value on the command line is read as TOML, or else as plain
text.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, time
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from asyncmesh.config import Config, meaningless_settings, setting_names, unknown_setting
from asyncmesh.errors import ConfigError, InputFileError

Nested = dict[str, Any]


@dataclass
class Layers:
    """Settings collected from several places. `origin[setting]` says which place won."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def add(self, settings: Mapping[str, Any], origin: str) -> None:
        """Put a layer of `section.key: value` on top."""
        for name, value in settings.items():
            if name not in setting_names():
                raise unknown_setting(name)
            self.values[name] = value
            self.origin[name] = origin
        self._drop_what_was_meant_for_another_method(settings)

    def _drop_what_was_meant_for_another_method(self, settings: Mapping[str, Any]) -> None:
        """A layer that chooses a method starts from that method's own defaults where a value of a
        layer below would make no sense. In one layer the two contradict each other, and `Config`
        says so.
        """
        for name in ("averaging.method", "pipeline.schedule"):
            for meaningless in meaningless_settings(name, settings.get(name)):
                if meaningless not in settings:
                    self.values.pop(meaningless, None)
                    self.origin.pop(meaningless, None)

    def config(self) -> Config:
        return Config.from_dict(nested(self.values))


def flattened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """{"mesh": {"stages": 4}} → {"mesh.stages": 4}; an empty table has nothing to say."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return flat


def nested(settings: Mapping[str, Any]) -> Nested:
    """The inverse of `flattened`."""
    tables: Nested = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        if section:
            tables.setdefault(section, {})[key] = value
        else:
            tables[key] = value
    return tables


def read_toml(path: Path) -> Nested:
    """A TOML file, or one line about why it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputFileError(
            f"{path}: there is no such file; give the path of a TOML file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputFileError(f"{path}: cannot be read ({error}); give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise InputFileError(f"{path}: is not valid TOML: {error}; mend that line") from None


def parse_assignment(argument: str) -> tuple[str, Any]:
    """`section.key=value` (leading dashes allowed) as a name and a TOML value."""
    name, equals, text = argument.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if not equals:
        if name in setting_names():
            raise ConfigError(name, "", "needs a value", f"write --{name}=VALUE")
        raise unknown_setting(name)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return name, text
    # A folder may be called 2026-11-18, which TOML reads as a date.
    return name, text if isinstance(value, date | time) else value


def preset_names() -> list[str]:
    """The presets that come with the package."""
    files = resources.files("asyncmesh.presets").iterdir()
    return sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml"))


def read_preset(name: str) -> Nested:
    """A preset by name."""
    if name not in preset_names():
        raise ConfigError(
            "--preset", name, "there is no such preset", f"choose from {', '.join(preset_names())}"
        )
    return tomllib.loads((resources.files("asyncmesh.presets") / f"{name}.toml").read_text())


def _settings_of(tables: Nested) -> dict[str, Any]:
    """A file's settings; its [compare] table belongs to `asyncmesh compare`."""
    for name, value in tables.items():
        if value == {} and name != "compare" and name not in Config.model_fields:
            raise unknown_setting(name)
    return flattened({name: value for name, value in tables.items() if name != "compare"})


def collect(preset: str | None, path: Path | None, assignments: Iterable[str]) -> Layers:
    """All layers of a command line."""
    layers = Layers()
    if preset is not None:
        layers.add(_settings_of(read_preset(preset)), f"preset {preset}")
    if path is not None:
        layers.add(_settings_of(read_toml(path)), str(path))
    layers.add(dict(map(parse_assignment, assignments)), "command line")
    return layers


def resolved(config: Config) -> dict[str, Any]:
    """Every setting with its effective value, `section.key: value`, method defaults included."""
    values = flattened(config.model_dump())
    delay = config.averaging_delay
    return values | {
        "averaging.fraction": config.averaging_fraction,
        "averaging.interval": config.averaging_interval,
        "averaging.delay": "emergent" if delay is None else delay,
        "averaging.max_in_flight": config.rounds_in_flight,
        "averaging.outer_learning_rate": config.outer_learning_rate,
        "averaging.outer_momentum": config.outer_momentum,
        "optimizer.beta1": config.beta1,
        "optimizer.beta2": config.beta2,
        "optimizer.warmup_updates": config.warmup_updates,
    }


def to_toml(config: Config) -> str:
    """A configuration file that gives this configuration again (None, the default, is left out)."""
    effective = resolved(config) | {
        # Follows from others; written down, it would bind whoever changes them.
        "averaging.max_in_flight": config.averaging.max_in_flight,
    }
    values = {name: value for name, value in effective.items() if value is not None}
    tops = {name: value for name, value in values.items() if "." not in name}
    return tomli_w.dumps(tops | nested({n: v for n, v in values.items() if "." in n}))

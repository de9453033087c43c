"""A run's folder: who writes what into it, and when.

Owns the names of the files. Invariant: events are written in blocks and at every validation, so a
run that diverges or is interrupted leaves what it had recorded; `summary.json` is written last.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from asyncmesh.config import Config
from asyncmesh.configuration import read_toml, to_toml
from asyncmesh.errors import ConfigError, InputFileError
from asyncmesh.observe.events import Evaluation, Event, EventFiles, EventHash, Loss


class RunFolder:
    """A folder that a run is being recorded in."""

    def __init__(self, path: Path, config: Config, keep_events: bool = True) -> None:
        self.path = path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (path / "config.toml").write_text(to_toml(config), encoding="utf-8")
        except OSError as error:
            reason = (error.strerror or "cannot be written").lower()
            raise _unusable(str(path), reason) from None
        self._events = EventFiles(path / "events") if keep_events else None
        self._hash = EventHash()
        self._metrics = Metrics(path / "metrics.jsonl", config)

    @classmethod
    def new(cls, config: Config, parent: Path = Path("runs")) -> RunFolder:
        """`output_dir`, which must not hold a run yet; by default the next free runs/METHOD-N."""
        if config.output_dir is None:
            return cls(next_free(parent, config.averaging.method), config)
        try:
            path = Path(config.output_dir).expanduser()
            taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
        except (OSError, RuntimeError) as error:  # too long, not to be read, no such home folder
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            raise _unusable(config.output_dir, reason) from None
        if taken:
            raise ConfigError(
                "output_dir",
                config.output_dir,
                "already exists and is not an empty folder",
                "choose another, or remove it",
            )
        return cls(path, config)

    def __call__(self, event: Event) -> None:
        if self._events is not None:
            self._events(event)
            if isinstance(event, Evaluation):
                self._events.flush()
        self._hash(event)
        self._metrics(event)

    def close(self) -> None:
        """Write what is still held back, however the run ended."""
        if self._events is not None:
            self._events.flush()
        self._metrics.close()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write what is still held back, and the summary."""
        self.close()
        content = _strict(summary | {"event_hash": self._hash.hexdigest()})
        text = json.dumps(content, indent=2, allow_nan=False)
        (self.path / "summary.json").write_text(text + "\n", encoding="utf-8")


def _unusable(folder: str, reason: str) -> ConfigError:
    return ConfigError("output_dir", folder, reason, "choose a folder that can be written to")


class Metrics:
    """A sink: a line a validation, and a line an update with the replicas' mean training loss."""

    def __init__(self, path: Path, config: Config) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._accumulation = config.pipeline.accumulation
        self._of_update = self._accumulation * config.mesh.replicas
        self._losses: dict[int, list[float]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluation):
            self._write(
                {"update": event.update, "seconds": event.time_s, "validation_loss": event.loss}
            )
        elif isinstance(event, Loss):
            update = event.microbatch // self._accumulation + 1
            losses = self._losses.setdefault(update, [])
            losses.append(event.loss)
            if len(losses) == self._of_update:
                del self._losses[update]
                mean = sum(losses) / len(losses)
                self._write({"update": update, "seconds": event.time_s, "training_loss": mean})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_strict(line), allow_nan=False) + "\n")

    def close(self) -> None:
        self._file.close()


def _strict(value: Any) -> Any:
    """JSON knows no NaN or infinity: a loss that diverged becomes null."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def next_free(parent: Path, name: str) -> Path:
    """parent/name-N with the lowest N from 1 that does not exist."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


def read_summary(path: Path) -> dict[str, Any]:
    """A run's `summary.json`, or one line about what is missing."""
    file = path / "summary.json"
    if not file.is_file():
        raise InputFileError(
            f"{path}: holds no summary.json, so it is no finished run; give a run's folder, as"
            " printed at the end of a run"
        )
    try:
        summary: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputFileError(f"{file}: cannot be read ({error}); run again") from None
    if not isinstance(summary, dict) or "status" not in summary:
        raise InputFileError(f"{file}: is not the summary of a run; run again")
    return summary


def read_config(path: Path) -> Config:
    """The configuration that a run was made with."""
    return Config.from_dict(read_toml(path / "config.toml"))

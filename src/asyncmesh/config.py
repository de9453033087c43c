"""A configuration: all settings of a run together, and the rules between them.

Invariants: a `Config` that exists obeys every rule that can be checked without data or a model; an
unknown key is an error that suggests the nearest one; `None` means "the default of the chosen
method" and is resolved by a property here and nowhere else. The settings themselves are in
`sections.py`; how values are layered (defaults, preset, file, command line) is `configuration.py`'s
business.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from asyncmesh.errors import AsyncMeshError, ConfigError, UnknownSettingError
from asyncmesh.sections import (
    AveragingConfig,
    ComputeConfig,
    DataConfig,
    LinksConfig,
    MeshConfig,
    ModelConfig,
    NonNegative,
    OptimizerConfig,
    PipelineConfig,
    Section,
    TrainConfig,
)

_AVERAGING_DEFAULTS: dict[str, dict[str, Any]] = {
    "async-momentum": {"fraction": 0.05, "interval": 1, "delay": 10},
    "async-ema": {"fraction": 0.05, "interval": 1, "delay": 10},
    "async-delta": {"fraction": 0.05, "interval": 1, "delay": 10},
    "async-overwrite": {"fraction": 0.05, "interval": 1, "delay": 10},
    "sparta": {"fraction": 0.05, "interval": 1, "delay": 0},
    "allreduce": {"fraction": 1.0, "interval": 1, "delay": 0},
    "diloco": {"fraction": 1.0, "interval": 30, "delay": 0},
    "local-sgd": {"fraction": 1.0, "interval": 10, "delay": 0},
    "none": {"fraction": 1.0, "interval": 1, "delay": 0},
}
# (learning rate, momentum) of the agreed value: DiLoCo's own, and what was best here.
_OUTER_DEFAULTS = {
    "diloco": (0.7, 0.9),
    "async-momentum": (1.0, 0.5),
}
_OPTIMIZER_DEFAULTS: dict[str, dict[str, float]] = {
    "nadamw": {"beta1": 0.95, "beta2": 0.999},
    "adamw": {"beta1": 0.9, "beta2": 0.999},
    "muon": {"beta1": 0.95, "beta2": 0.999},
    "sgd": {"beta1": 0.0, "beta2": 0.0},
}


_LEAST_FRACTION = 1e-6


class Config(Section):
    """All settings of a run. See `Config.from_dict`; `asyncmesh … --print-config` lists them."""

    seed: NonNegative = Field(0, description="of weights, data order, subsets and virtual jitter")
    output_dir: str | None = Field(None, description="the run's folder; default: runs/METHOD-N")
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    averaging: AveragingConfig = AveragingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    links: LinksConfig = LinksConfig()
    compute: ComputeConfig = ComputeConfig()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Build from nested dicts with the keys of the TOML files; a mistake is one line."""
        if not isinstance(values, Mapping):
            raise ConfigError("config", values, "must be a dict of settings", 'e.g. {"seed": 1}')
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise _told_in_one_line(error.errors()) from None

    def replace(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with some keys changed: `config.replace(mesh={"stages": 4})`."""
        values = self.model_dump(exclude_unset=True)
        for name, changes in sections.items():
            values[name] = {**values.get(name, {}), **changes}
        return Config.from_dict(values)

    def on_a_real_mesh(self) -> Config:
        """The same with rounds that take as long as they take, unless a delay was asked for.

        A fixed delay is a thing of the simulator: a real worker would have to wait for a late mean.
        """
        asynchronous = self.averaging.method.startswith("async-")
        if not asynchronous or self.averaging.delay is not None:
            return self
        return self.replace(averaging={"delay": "emergent"})

    # -- defaults that depend on the chosen method ------------------------------------------------
    def _of_method(self, key: str) -> Any:
        value = getattr(self.averaging, key)
        return _AVERAGING_DEFAULTS[self.averaging.method][key] if value is None else value

    @property
    def averaging_fraction(self) -> float:
        """p, which is all of it where gradients or nothing is averaged."""
        if self.averaging.method in ("allreduce", "none"):
            return 1.0
        return float(self._of_method("fraction"))

    @property
    def averaging_interval(self) -> int:
        if self.averaging.method in ("allreduce", "none"):
            return 1
        return int(self._of_method("interval"))

    @property
    def averaging_delay(self) -> int | None:
        """Updates from a snapshot to its merge; None when the links decide."""
        if self.averaging.method == "none":
            return 0
        delay = self._of_method("delay")
        return None if delay == "emergent" else int(delay)

    @property
    def classes(self) -> int:
        """K = ceil(1/p): the rounds of a cycle. (1/49 is no binary fraction: hence the slack.)"""
        return math.ceil(1 / self.averaging_fraction - 1e-9)

    @property
    def rounds_in_flight(self) -> int:
        """The most rounds that may be under way at once, the newest included."""
        if self.averaging.method in ("allreduce", "none") or self.mesh.replicas == 1:
            return 1
        if self.averaging.max_in_flight is not None:
            return self.averaging.max_in_flight
        if self.averaging_delay is None:
            return max(1, self.classes // 2)
        return max(1, math.ceil(self.averaging_delay / self.averaging_interval))

    @property
    def outer_learning_rate(self) -> float:
        given, default = self.averaging.outer_learning_rate, _OUTER_DEFAULTS["async-momentum"]
        return _OUTER_DEFAULTS.get(self.averaging.method, default)[0] if given is None else given

    @property
    def outer_momentum(self) -> float:
        given, default = self.averaging.outer_momentum, _OUTER_DEFAULTS["async-momentum"]
        return _OUTER_DEFAULTS.get(self.averaging.method, default)[1] if given is None else given

    @property
    def beta1(self) -> float:
        given = self.optimizer.beta1
        return _OPTIMIZER_DEFAULTS[self.optimizer.name]["beta1"] if given is None else given

    @property
    def beta2(self) -> float:
        given = self.optimizer.beta2
        return _OPTIMIZER_DEFAULTS[self.optimizer.name]["beta2"] if given is None else given

    @property
    def warmup_updates(self) -> int:
        given = self.optimizer.warmup_updates
        return self.train.updates // 10 if given is None else given

    # -- rules over several settings --------------------------------------------------------------
    @model_validator(mode="after")
    def _obeys_the_rules(self) -> Self:
        self._check_edges()
        self._check_schedule()
        if self.averaging.method != "none" and self.mesh.replicas > 1:
            self._check_method()
            self._check_rounds()
        self._check_slowdowns()
        if self.model.width % self.model.heads:
            raise ConfigError(
                "model.heads",
                self.model.heads,
                f"must divide model.width = {self.model.width}",
                f"try model.heads={math.gcd(self.model.width, self.model.heads)}",
            )
        if self.warmup_updates > self.train.updates:
            raise ConfigError(
                "optimizer.warmup_updates",
                self.warmup_updates,
                f"must not exceed train.updates = {self.train.updates}",
                f"try optimizer.warmup_updates={self.train.updates // 10}",
            )
        return self

    def _check_edges(self) -> None:
        edges = self.mesh.stages - 1
        per_edge = {
            "pipeline.extra_depth": self.pipeline.extra_depth,
            "links.bandwidth_mbps": self.links.bandwidth_mbps,
            "links.latency_ms": self.links.latency_ms,
            "links.jitter_ms": self.links.jitter_ms,
        }
        for setting, value in per_edge.items():
            if isinstance(value, list) and len(value) != edges:
                raise ConfigError(
                    setting,
                    value,
                    f"a list needs one entry for each of the {edges} edges between"
                    f" mesh.stages = {self.mesh.stages}",
                    "give one number for all edges, or that many",
                )

    def _check_schedule(self) -> None:
        """The flushed schedules have one depth and one order: other values would do nothing."""
        schedule, depth = self.pipeline.schedule, self.pipeline.extra_depth
        if schedule == "async":
            return
        if any(depth) if isinstance(depth, list) else depth:
            raise ConfigError(
                "pipeline.extra_depth",
                depth,
                f"pipeline.schedule = {schedule} flushes at every update and keeps no more in"
                " flight",
                "remove it, or use pipeline.schedule=async",
            )
        if self.pipeline.order == "eager":
            raise ConfigError(
                "pipeline.order",
                "eager",
                f"pipeline.schedule = {schedule} has an order of its own",
                "remove it, or use pipeline.schedule=async",
            )

    def _check_method(self) -> None:
        """No value that the averaging method has no use for."""
        method = self.averaging.method
        if method == "allreduce":
            for key in ("fraction", "interval"):
                value = getattr(self.averaging, key)
                if value not in (None, 1):
                    raise ConfigError(
                        f"averaging.{key}",
                        value,
                        "allreduce averages whole gradients at every update",
                        f"remove it, or use averaging.method=sparta for a {key} of your own",
                    )
        if not method.startswith("async-") and self.averaging_delay != 0:
            raise ConfigError(
                "averaging.delay",
                self.averaging.delay,
                f"{method} waits for every round, so its delay is 0",
                "remove averaging.delay, or use a method that begins with async-",
            )

    def _check_rounds(self) -> None:
        """A coordinate is in at most one round in flight."""
        delay = self.averaging_delay
        if self.averaging_fraction < _LEAST_FRACTION:
            raise ConfigError(
                "averaging.fraction",
                self.averaging_fraction,
                f"must be at least {_LEAST_FRACTION:g}: a cycle takes 1/fraction rounds",
                f"try averaging.fraction={_AVERAGING_DEFAULTS['sparta']['fraction']}",
            )
        if self.averaging.max_in_flight is not None and self.rounds_in_flight > self.classes:
            raise ConfigError(
                "averaging.max_in_flight",
                self.averaging.max_in_flight,
                f"a coordinate may be in one round at a time, and a cycle has {self.classes} rounds"
                f" (averaging.fraction = {self.averaging_fraction:g})",
                f"try averaging.max_in_flight={self.classes}",
            )
        if delay is None:
            return
        overlapping = max(1, math.ceil(delay / self.averaging_interval))
        allowed = min(self.classes, self.rounds_in_flight)
        if overlapping > allowed:
            bound_by_classes = self.averaging.max_in_flight is None
            raise ConfigError(
                "averaging.delay",
                delay,
                f"{overlapping} rounds would be in flight at once (delay / interval), but a"
                f" coordinate may be in one round at a time: a cycle has {self.classes} rounds"
                f" (averaging.fraction = {self.averaging_fraction:g})"
                + ("" if bound_by_classes else f" and {self.rounds_in_flight} may be in flight"),
                f"try averaging.interval={math.ceil(delay / allowed)} or "
                + (
                    f"averaging.fraction={1 / overlapping:.3g}"
                    if bound_by_classes
                    else f"a larger averaging.max_in_flight (now {self.rounds_in_flight})"
                ),
            )

    def _check_slowdowns(self) -> None:
        for setting, value, count, of in (
            ("compute.stage_slowdown", self.compute.stage_slowdown, self.mesh.stages, "stages"),
            (
                "compute.replica_slowdown",
                self.compute.replica_slowdown,
                self.mesh.replicas,
                "replicas",
            ),
            (
                "links.replica_slowdown",
                self.links.replica_slowdown,
                self.mesh.replicas,
                "replicas",
            ),
        ):
            if value and len(value) != count:
                raise ConfigError(
                    setting,
                    value,
                    f"needs one factor for each of mesh.{of} = {count}",
                    f"give {count} numbers, or none",
                )


def setting_names() -> list[str]:
    """All keys, as `section.key` (and the two without a section)."""
    names = []
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            names += [f"{name}.{key}" for key in section.model_fields]
        else:
            names.append(name)
    return names


def meaningless_settings(name: str, value: object) -> tuple[str, ...]:
    """Settings that have no meaning where the setting `name` has this value."""
    if name == "pipeline.schedule" and value in ("1f1b", "gpipe"):
        return ("pipeline.extra_depth", "pipeline.order")
    if name != "averaging.method" or value is None or str(value).startswith("async-"):
        return ()
    if value in ("allreduce", "none"):
        return tuple(f"averaging.{k}" for k in ("delay", "fraction", "interval", "max_in_flight"))
    return ("averaging.delay",)  # a method that waits for its rounds has none


def unknown_setting(name: str) -> UnknownSettingError:
    """The error for a key that does not exist, with the nearest that does."""
    known = setting_names()
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5) or [
        candidate for candidate in known if candidate.rpartition(".")[2] == name.rpartition(".")[2]
    ]
    hint = f"did you mean {near[0]}?" if near else "--print-config lists all settings"
    return UnknownSettingError(f"{name}: there is no such setting; {hint}")


def default_of(name: str) -> Any:
    """The default of `section.key`, for error messages and tables."""
    section, _, key = name.rpartition(".")
    owner: Any = getattr(Config(), section) if section else Config()
    return getattr(owner, key)


def _told_in_one_line(details: list[ErrorDetails]) -> AsyncMeshError:
    """pydantic's complaints about the first wrong setting as `setting = value: rule; fix`."""
    detail = details[0]
    place = [str(part) for part in detail["loc"]]
    name = ".".join(place)
    if detail["type"] == "extra_forbidden":
        given = detail["input"]
        if len(place) == 1 and isinstance(given, Mapping) and given:  # a whole table is unknown
            name = f"{name}.{next(iter(given))}"
        return unknown_setting(name)
    setting = _setting_at(detail)
    if setting is None:
        return ConfigError(name, detail["input"], "must be a table of settings", "see docs")
    rule, value = _broken_rule([d for d in details if _setting_at(d) == setting])
    default = default_of(setting)
    fix = f"the default is {default}" if default is not None else "leave it out for the default"
    return ConfigError(setting, value, rule, fix)


def _setting_at(detail: ErrorDetails) -> str | None:
    """The setting that a complaint is about; its place also names a union's branch or an index."""
    known, place = setting_names(), [str(part) for part in detail["loc"]]
    while place and ".".join(place) not in known:
        place.pop()
    return ".".join(place) or None


def _broken_rule(details: list[ErrorDetails]) -> tuple[str, Any]:
    """The rule in words, and the value that broke it.

    A setting that can be one thing or another brings a complaint for each. Of a list only what is
    said of its entries helps, and of anything else only what is not about lists.
    """
    of_entries = [d for d in details if isinstance(d["loc"][-1], int)]
    others = [d for d in details if d["type"] != "list_type"]
    chosen = of_entries[:1] or others or details
    rules = dict.fromkeys(
        d["msg"].replace("Input should be", "must be").replace("'", '"') for d in chosen
    )
    return " or ".join(rules).replace(" or must be ", " or "), chosen[0]["input"]

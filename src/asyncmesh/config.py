"""Every setting of a run: its name, default, range and what it means.

Owns the contract of the configuration files. Invariants: a `Config` that exists obeys every rule
that can be checked without data or a model; an unknown key is an error that suggests the nearest
one; `None` means "the default of the chosen method" and is resolved by a property here and nowhere
else. How values are layered (defaults, preset, file, command line) is `configuration.py`'s
business.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from asyncmesh.errors import AsyncMeshError, ConfigError, UnknownSettingError

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
# Beyond 1e12 nothing has a meaning, and a float32 kernel would refuse what is beyond its own range.
Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Mbps = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
FactorOrZero = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
WireDtype = Literal["auto", "float32", "bfloat16"]

AveragingMethod = Literal[
    "async-momentum",
    "async-ema",
    "async-delta",
    "async-overwrite",
    "sparta",
    "allreduce",
    "diloco",
    "local-sgd",
    "none",
]
OptimizerName = Literal["nadamw", "adamw", "muon", "sgd"]

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


class Section(BaseModel):
    """One table of the TOML file: immutable, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TrainConfig(Section):
    updates: Positive = Field(300, description="optimiser steps of every worker")
    eval_every: Positive = Field(50, description="updates between two validations")
    eval_sequences: Positive = Field(64, description="sequences of the validation text")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the stages compute")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="bfloat16 means autocast over float32 weights"
    )
    compile: bool = Field(False, description="torch.compile every stage")


class MeshConfig(Section):
    stages: Positive = Field(2, description="P: parts the model is cut into")
    replicas: Positive = Field(2, description="M: copies of the whole pipeline")


class PipelineConfig(Section):
    schedule: Literal["async", "1f1b", "gpipe"] = Field(
        "async", description="async never flushes; 1f1b and gpipe flush at every update"
    )
    microbatch_size: Positive = Field(8, description="sequences in a microbatch")
    accumulation: Positive = Field(1, description="k: microbatches averaged into one update")
    extra_depth: NonNegative | list[NonNegative] = Field(
        0,
        description="h: more microbatches in flight per downstream edge; one number or one an edge",
    )
    order: Literal["strict", "eager"] = Field(
        "strict", description="strict is reproducible; eager follows arrivals, for jittery links"
    )
    wire_dtype: WireDtype = Field("auto", description="of activations and gradients between stages")


class AveragingConfig(Section):
    method: AveragingMethod = Field("async-momentum", description="how replicas are kept together")
    fraction: Fraction | None = Field(None, description="p: share of the coordinates in a round")
    interval: Positive | None = Field(None, description="updates between two rounds at the least")
    delay: NonNegative | Literal["emergent"] | None = Field(
        None, description="simulator: updates until a round merges, or emergent: as the links say"
    )
    max_in_flight: Positive | None = Field(
        None, description="rounds that may be under way at once; default: what delay needs"
    )
    correction: Literal["ema", "delta"] = Field(
        "delta", description="async-momentum: how a replica's own moves are kept at a merge"
    )
    strength: Share = Field(1.0, description="λ: weight of the correction")
    ema_start: Decay = Field(0.5, description="β of the correction at first")
    ema_end: Decay = Field(0.99, description="β of the correction at the end")
    ema_warmup: Share = Field(1 / 30, description="share of the updates before β starts to rise")
    outer_learning_rate: Factor | None = Field(None, description="η_o of the agreed value")
    outer_momentum: Decay | None = Field(None, description="μ of the agreed value's momentum")
    wire_dtype: WireDtype = Field("auto", description="of the averaged coordinates")


class OptimizerConfig(Section):
    name: OptimizerName = Field("nadamw", description="nadamw looks ahead over the delay")
    learning_rate: Factor = Field(1e-3, description="η at its highest")
    beta1: Decay | None = Field(None, description="first moment; sgd: momentum; muon: momentum")
    beta2: Decay | None = Field(None, description="second moment")
    momentum_decay: FactorOrZero = Field(0.1, description="ψ of nadamw")
    epsilon: Factor = Field(1e-8, description="ε in the denominator")
    weight_decay: FactorOrZero = Field(0.01, description="λ_wd (sgd: L2)")
    max_grad_norm: FactorOrZero = Field(
        1.0, description="gradients are clipped to this norm per stage; 0: never"
    )
    warmup_updates: NonNegative | None = Field(
        None, description="linear warm-up; default: a tenth of the updates"
    )
    schedule: Literal["cosine", "constant"] = Field("cosine", description="after the warm-up")
    min_lr_ratio: Share = Field(0.1, description="where the cosine ends, as a share of η")
    error_feedback: bool = Field(
        False, description="extrapolate each step over the stage's mean delay"
    )
    delay_discount: NonNegative = Field(
        0,
        description="updates over which a stage's rate rises from η/delay to η (PipeMare); 0: off",
    )


class ModelConfig(Section):
    name: Literal["gpt"] = "gpt"
    layers: Positive = Field(4, description="transformer blocks")
    width: Positive = Field(128, description="of the residual stream")
    heads: Positive = Field(4, description="attention heads; must divide width")
    context: Positive = Field(128, description="tokens a sequence")
    vocab: Positive | None = Field(None, description="token ids; default: what the data needs")
    positions: Literal["rotary", "learned"] = Field("rotary", description="how order is told")
    dropout: Decay = Field(0.0, description="on embeddings and both residual branches")


class DataConfig(Section):
    source: str = Field("builtin", description="builtin, a text file, or tokens: .u16 or .u16.xz")
    validation: str | None = Field(
        None, description="a file like source; default: the last tenth of source"
    )


class LinksConfig(Section):
    bandwidth_mbps: Mbps | list[Mbps] | None = Field(
        None,
        description="of each pipeline edge and direction; one or one an edge; default: endless",
    )
    latency_ms: Milliseconds | list[Milliseconds] = Field(0.0, description="one way, an edge")
    jitter_ms: Milliseconds | list[Milliseconds] = Field(
        0.0, description="mean of an exponential extra delay on pipeline edges"
    )
    averaging_bandwidth_mbps: Mbps | None = Field(
        None, description="between the replicas of a stage; default: as the slowest pipeline edge"
    )
    averaging_latency_ms: Milliseconds | None = Field(
        None, description="between the replicas of a stage; default: as the slowest pipeline edge"
    )


class ComputeConfig(Section):
    forward_ms: Milliseconds = Field(1.0, description="virtual time of a microbatch's forward")
    backward_ms: Milliseconds = Field(2.0, description="virtual time of a microbatch's backward")
    update_ms: Milliseconds = Field(0.1, description="virtual time of an update")
    jitter: Annotated[float, Field(ge=0, le=2)] = Field(
        0.0, description="relative spread (log-normal) of every compute time"
    )
    stage_slowdown: list[Factor] = Field([], description="factor on every stage's times; [] is 1")
    replica_slowdown: list[Factor] = Field([], description="factor on every replica's times")


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
        self._check_averaging()
        self._check_compute()
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
        """The flushed schedules have one depth and one order; a value that does nothing misleads."""
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

    def _check_averaging(self) -> None:
        method, delay = self.averaging.method, self.averaging_delay
        if method == "none" or self.mesh.replicas == 1:
            return  # no rounds, so nothing that could overlap
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
        if self.averaging_fraction < _LEAST_FRACTION:
            raise ConfigError(
                "averaging.fraction",
                self.averaging_fraction,
                f"must be at least {_LEAST_FRACTION:g}: a cycle takes 1/fraction rounds",
                f"try averaging.fraction={_AVERAGING_DEFAULTS['sparta']['fraction']}",
            )
        if not method.startswith("async-") and delay != 0:
            raise ConfigError(
                "averaging.delay",
                self.averaging.delay,
                f"{method} waits for every round, so its delay is 0",
                "remove averaging.delay, or use a method that begins with async-",
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

    def _check_compute(self) -> None:
        for setting, value, count, of in (
            ("compute.stage_slowdown", self.compute.stage_slowdown, self.mesh.stages, "stages"),
            (
                "compute.replica_slowdown",
                self.compute.replica_slowdown,
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

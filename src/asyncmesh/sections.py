"""The tables of a configuration file: every setting's name, default, range and what it means.

Owns the contract of the configuration files, one class a table. What holds between settings, and
what `None` ("the default of the chosen method") comes to, is `config.py`'s business.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
    threads: Positive | None = Field(
        None, description="on the CPU; default: the cores shared out among a host's processes"
    )


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
    wire_dtype: WireDtype = Field(
        "auto",
        description="of activations and gradients between stages; auto: what they are, and"
        " bfloat16 from a GPU of a real mesh",
    )


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

    replica_slowdown: list[Factor] = Field(
        [],
        description="factor on every replica's latencies and on the time its bytes take; the"
        " slowest one sets the pace of averaging; [] is 1",
    )


class ComputeConfig(Section):
    emulated: bool = Field(
        False, description="real mesh: workers sleep for these times instead of computing"
    )
    forward_ms: Milliseconds = Field(1.0, description="virtual time of a microbatch's forward")
    backward_ms: Milliseconds = Field(2.0, description="virtual time of a microbatch's backward")
    update_ms: Milliseconds = Field(
        0.1, description="virtual time of an update, at a stage of average cost"
    )
    jitter: Annotated[float, Field(ge=0, le=2)] = Field(
        0.0, description="relative spread (log-normal) of every compute time"
    )
    stage_slowdown: list[Factor] = Field([], description="factor on every stage's times; [] is 1")
    replica_slowdown: list[Factor] = Field([], description="factor on every replica's times")

"""From settings to the objects of this package: the one place that knows all names.

Owns which class a name stands for. Invariant: what is built depends on (config, stage) alone.
"""

from __future__ import annotations

from torch import Tensor

from asyncmesh.algorithm.baselines import SGD, AdamW
from asyncmesh.algorithm.correction import (
    METHODS,
    Agreement,
    Correction,
    DeltaCorrection,
    EmaCorrection,
    EmaDecay,
    MomentumAgreement,
)
from asyncmesh.algorithm.layout import FlatLayout
from asyncmesh.algorithm.lookahead import NAdamW
from asyncmesh.algorithm.muon import Muon
from asyncmesh.algorithm.optimizer import ErrorFeedback, Optimizer
from asyncmesh.algorithm.schedule import LearningRate
from asyncmesh.algorithm.subsets import Partition
from asyncmesh.config import Config


def make_optimizer(
    config: Config, like: Tensor, layout: FlatLayout, matrices: frozenset[str], mean_delay: float
) -> Optimizer:
    """The optimiser of a stage whose weights are shaped `like`."""
    o, beta1, beta2 = config.optimizer, config.beta1, config.beta2
    inner: Optimizer
    if o.name == "nadamw":
        inner = NAdamW(like, beta1, beta2, o.momentum_decay, o.epsilon, o.weight_decay)
    elif o.name == "adamw":
        inner = AdamW(like, beta1, beta2, o.epsilon, o.weight_decay)
    elif o.name == "muon":
        inner = Muon(like, layout, matrices, beta1, beta2, o.epsilon, o.weight_decay)
    else:
        inner = SGD(like, beta1, o.weight_decay)
    return ErrorFeedback(inner, mean_delay, like) if o.error_feedback else inner


def make_learning_rate(config: Config, mean_delay: float) -> LearningRate:
    """η_u of a stage."""
    return LearningRate(
        peak=config.optimizer.learning_rate,
        schedule=config.optimizer.schedule,
        updates=config.train.updates,
        warmup_updates=config.warmup_updates,
        min_ratio=config.optimizer.min_lr_ratio,
        mean_delay=mean_delay,
        discount_updates=config.optimizer.delay_discount,
    )


def make_partition(config: Config, numel: int, stage: int) -> Partition:
    """The rounds' subsets of a stage with `numel` coordinates."""
    return Partition(numel, config.classes, config.rounds_in_flight, config.seed, stage)


def make_merge_rule(config: Config, initial: Tensor) -> tuple[Agreement, Correction]:
    """The two halves of a merge, for weights that start as `initial`."""
    if config.mesh.replicas == 1:
        return Agreement(), Correction()  # never used; takes no memory
    method, a = METHODS[config.averaging.method], config.averaging
    agreement = Agreement()
    if method.agreement == "momentum":
        agreement = MomentumAgreement(initial, config.outer_learning_rate, config.outer_momentum)
    name = a.correction if method.correction == "configured" else method.correction
    if name == "ema":
        decay = EmaDecay(a.ema_start, a.ema_end, a.ema_warmup, config.train.updates)
        return agreement, EmaCorrection(initial, decay)
    return agreement, DeltaCorrection() if name == "delta" else Correction()

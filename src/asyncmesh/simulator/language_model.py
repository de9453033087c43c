"""From a configuration to a language-model job, or to its sizes alone.

Owns how the model family, the data and the virtual mesh are put together. Invariant: the job is a
function of the configuration, so that two methods of a comparison see the same weights and batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncmesh.config import Config
from asyncmesh.data.sampler import Dataset, open_data
from asyncmesh.model.gpt import build_stage, build_stages, cross_entropy
from asyncmesh.model.splitting import stage_costs
from asyncmesh.simulator.mesh import Sizes
from asyncmesh.simulator.run import Job, choose_device


@dataclass(frozen=True)
class LanguageModelJob:
    """A job and the data it was made from."""

    job: Job
    data: Dataset


def language_model_job(config: Config) -> LanguageModelJob:
    """The model and data that the configuration names, ready to run."""
    data, device = open_data(config), choose_device(config)
    stages = build_stages(config.model, data.vocab, config.mesh.stages, config.seed)
    if config.train.dtype == "float64":
        stages = [stage.double() for stage in stages]
    job = Job(
        config=config,
        stages=[stage.to(device) for stage in stages],
        loss=cross_entropy,
        batches=data.batches,
        device=device,
        validation=data.validation,
        stage_costs=stage_costs(config.model, data.vocab, config.mesh.stages),
    )
    return LanguageModelJob(job, data)


def stage_sizes(config: Config, vocab: int) -> Sizes:
    """What a hollow mesh needs to know, without allocating the model."""
    stages, model = config.mesh.stages, config.model
    # Under bfloat16 autocast the residual stream between blocks stays float32.
    width = 2 if config.pipeline.wire_dtype == "bfloat16" else weights_width(config)
    activation = config.pipeline.microbatch_size * model.context * model.width * width
    parts = [build_stage(model, vocab, stages, s, config.seed, "meta") for s in range(stages)]
    coordinates = [sum(p.numel() for p in part.parameters()) for part in parts]
    return Sizes([activation] * (stages - 1), coordinates, weights_width(config))


def tokens_per_microbatch(config: Config) -> int:
    return config.pipeline.microbatch_size * config.model.context


def weights_width(config: Config) -> int:
    """Bytes of one coordinate of a version."""
    return 8 if config.train.dtype == "float64" else torch.float32.itemsize

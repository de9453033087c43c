"""From a configuration to a language-model job, or to its sizes alone.

Owns how the model family, the data and the virtual mesh are put together. Invariant: the job is a
function of the configuration, so that two methods of a comparison see the same weights and batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from asyncmesh.config import Config
from asyncmesh.data.sampler import Dataset, open_data
from asyncmesh.device import choose_device
from asyncmesh.engine import wire_width
from asyncmesh.errors import ConfigError
from asyncmesh.model.gpt import build_stages, coordinates, cross_entropy
from asyncmesh.model.splitting import stage_costs
from asyncmesh.observe.events import Sink
from asyncmesh.simulator.mesh import Sizes, VirtualMesh
from asyncmesh.simulator.run import Job


@dataclass(frozen=True)
class LanguageModelJob:
    """A job and the data it was made from."""

    job: Job
    data: Dataset


def language_model_job(config: Config) -> LanguageModelJob:
    """The model and data that the configuration names, ready to run."""
    data, device = open_data(config), choose_device(config)
    job = Job(
        config=config,
        stages=_built(config, data.vocab, device),
        loss=cross_entropy,
        batches=data.batches,
        device=device,
        validation=data.validation,
        stage_costs=stage_costs(config.model, data.vocab, config.mesh.stages),
    )
    return LanguageModelJob(job, data)


def _built(config: Config, vocab: int, device: torch.device) -> list[nn.Module]:
    try:
        stages = build_stages(config.model, vocab, config.mesh.stages, config.seed)
        dtype = torch.float64 if config.train.dtype == "float64" else torch.float32
        return [stage.to(device, dtype) for stage in stages]
    except (RuntimeError, MemoryError) as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        parameters = sum(stage_sizes(config, vocab).coordinates)
        raise ConfigError(
            "model.width",
            config.model.width,
            f"a model of {parameters:,} parameters does not fit into this machine's memory",
            f"lower it, or model.layers = {config.model.layers}",
        ) from None


def hollow_mesh(config: Config, vocab: int, emit: Sink) -> VirtualMesh:
    """The mesh of such a job without its numbers: the same decisions at the same virtual times."""
    costs = stage_costs(config.model, vocab, config.mesh.stages)
    return VirtualMesh(config, emit, sizes=stage_sizes(config, vocab), stage_costs=costs)


def stage_sizes(config: Config, vocab: int) -> Sizes:
    """What a hollow mesh needs to know, without allocating the model."""
    stages, model = config.mesh.stages, config.model
    # Under bfloat16 autocast the residual stream between blocks stays float32.
    width = wire_width(config.pipeline.wire_dtype, weights_width(config))
    activation = config.pipeline.microbatch_size * model.context * model.width * width
    sizes = coordinates(model, vocab, stages)
    return Sizes([activation] * (stages - 1), sizes, weights_width(config))


def tokens_of(config: Config, microbatches: int) -> int:
    return microbatches * config.pipeline.microbatch_size * config.model.context


def weights_width(config: Config) -> int:
    """Bytes of one coordinate of a version."""
    return 8 if config.train.dtype == "float64" else torch.float32.itemsize

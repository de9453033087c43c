"""One run on the virtual mesh, from stages and data to events, summary and final weights.

Owns the order of a run: engines are built, the mesh runs, and however it ends (done, diverged,
interrupted) everything recorded so far is summarised. Invariant: the process' random state is left
as it was found.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from asyncmesh.config import Config
from asyncmesh.device import choose_device
from asyncmesh.engine import Engine, LossFunction, StageProgram
from asyncmesh.errors import ConfigError, DivergedError, StageError
from asyncmesh.observe.events import Event, Sink
from asyncmesh.observe.summary import SummaryBuilder
from asyncmesh.protocol.pipeline import PipelinePlan
from asyncmesh.simulator.evaluation import Progress, RunObserver
from asyncmesh.simulator.mesh import Sizes, VirtualMesh

Batch = tuple[Tensor, Tensor]
BatchFunction = Callable[[int, int], Batch]


@dataclass(frozen=True)
class Result:
    """What a run leaves behind. `error` says why it ended early."""

    weights: list[list[dict[str, Tensor]]]  # [replica][stage], by parameter name
    summary: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    error: DivergedError | None = None


class CountedBatches:
    """The data, checked for what it is, with the tokens (targets) that were drawn."""

    def __init__(self, batches: BatchFunction) -> None:
        self._batches = batches
        self._drawn = self._tokens = 0

    def __call__(self, replica: int, microbatch: int) -> Batch:
        batch = self._batches(replica, microbatch)
        check_batch(batch, f"batches({replica}, {microbatch})")
        self._drawn += 1
        self._tokens += batch[1].numel()
        return batch

    def tokens(self, microbatches: int) -> int:
        """In so many microbatches; by the mean of those drawn, should they differ in size."""
        return round(self._tokens / self._drawn * microbatches) if self._drawn else 0


def check_batch(batch: object, name: str) -> None:
    """A pair of tensors, with at least one target."""
    if not (
        isinstance(batch, tuple | list)
        and len(batch) == 2
        and all(isinstance(part, Tensor) for part in batch)
    ):
        raise StageError(f"{name}: must be a pair of tensors; return (input, target)")
    if not batch[1].numel():
        raise StageError(f"{name}: has no targets; give every batch at least one")


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what."""

    config: Config
    stages: Sequence[nn.Module]
    loss: LossFunction
    batches: BatchFunction
    device: torch.device
    validation: Sequence[Batch] = ()
    stage_costs: Sequence[float] | None = None
    digests: bool = False


def build_programs(job: Job) -> list[StageProgram]:
    """The stages' code, which several runs of a job may share (it is compiled only once)."""
    _check_stages(job.stages)
    last = len(job.stages) - 1
    return [
        StageProgram(module, job.config, job.device, job.loss if stage == last else None)
        for stage, module in enumerate(job.stages)
    ]


def build_engines(config: Config, programs: Sequence[StageProgram]) -> list[list[Engine]]:
    """A worker's numbers for every place of the mesh, [replica][stage]."""
    return [
        [
            Engine(program, config, stage, replica, PipelinePlan.of(config, stage).mean_delay)
            for stage, program in enumerate(programs)
        ]
        for replica in range(config.mesh.replicas)
    ]


def _check_stages(stages: Sequence[nn.Module]) -> None:
    """Each is a module, and what it trains is its own: stages live on different machines."""
    owner: dict[int, tuple[int, str]] = {}
    for stage, module in enumerate(stages):
        if not isinstance(module, nn.Module):
            raise StageError(
                f"stages[{stage}] is a {type(module).__name__}: a stage must be an nn.Module; wrap"
                " a function in one"
            )
        for name, parameter in module.named_parameters():
            first, its_name = owner.setdefault(id(parameter), (stage, name))
            if first != stage:
                raise StageError(
                    f"stages[{stage}].{name} is stages[{first}].{its_name}: stages train apart and"
                    " cannot share a parameter; give each its own, e.g. copy.deepcopy(stage)"
                )


def run_job(
    job: Job,
    sink: Sink,
    progress: Progress | None = None,
    programs: Sequence[StageProgram] | None = None,
) -> Result:
    """Run to the end, or as far as it goes."""
    config = job.config
    programs = programs or build_programs(job)
    summary, batches = SummaryBuilder(config), CountedBatches(job.batches)

    def emit(event: Event) -> None:
        summary(event)
        sink(event)

    engines = build_engines(config, programs)
    observer = RunObserver(config, emit, programs, job.validation, batches.tokens, progress)
    sizes = Sizes([0] * (len(programs) - 1), [program.layout.numel for program in programs])
    mesh = VirtualMesh(
        config,
        emit,
        sizes=sizes,
        engines=engines,
        batches=batches,
        stage_costs=job.stage_costs,
        observer=observer,
        digests=job.digests,
    )
    began_s = time.perf_counter()
    status, error = _run_and_name_the_end(mesh, observer)
    wall_s = time.perf_counter() - began_s
    mesh.report_memory()
    return Result(
        weights=[[engine.named_weights() for engine in row] for row in engines],
        summary=summary.build(status, wall_s, batches.tokens),
        error=error,
    )


def _run_and_name_the_end(
    mesh: VirtualMesh, observer: RunObserver
) -> tuple[str, DivergedError | None]:
    """Run; answer the run's status, and the error of a run that diverged."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        mesh.run()
        observer.flush()
    except DivergedError as error:
        return "diverged", error
    except KeyboardInterrupt:
        return "interrupted", None
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
    return "completed", None


def simulate_modules(
    stages: Sequence[nn.Module],
    loss: LossFunction,
    batches: BatchFunction,
    config: Config,
    *,
    validation: Sequence[Batch] = (),
    digests: bool = False,
) -> Result:
    """Train any pipeline of modules on the virtual mesh.

    Stage i's output is stage i+1's input; the last stage's output goes into `loss(output, target)`.
    `batches(replica, microbatch)` gives `(input, target)`. The modules are left as they are: the
    trained tensors are in `result.weights[replica][stage]`, by name. `digests` records a hash of
    the weights with every forward and backward.

    Raises `DivergedError` when the loss is not finite any more; its attribute `result` holds
    everything up to then.
    """
    if not isinstance(config, Config):
        raise ConfigError(
            "config", config, "must be a Config", "pass asyncmesh.Config.from_dict({...})"
        )
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.Sequential | nn.ModuleList):
        raise StageError("stages: must be a list of modules; pass [module] for a single stage")
    stages = list(stages)
    for number, batch in enumerate(validation):
        check_batch(batch, f"validation[{number}]")
    if not stages:
        raise StageError("stages = []: a pipeline needs at least one stage; pass a list of modules")
    if "stages" not in config.mesh.model_fields_set and config.mesh.stages != len(stages):
        config = config.replace(mesh={"stages": len(stages)})
    if config.mesh.stages != len(stages):
        raise ConfigError(
            "mesh.stages",
            config.mesh.stages,
            f"{len(stages)} stages were handed over",
            f"set mesh.stages={len(stages)} or leave it out",
        )
    events: list[Event] = []
    job = Job(
        config=config,
        stages=stages,
        loss=loss,
        batches=batches,
        device=_device_of(stages, config),
        validation=validation,
        digests=digests,
    )
    ran = run_job(job, events.append)
    result = Result(ran.weights, ran.summary, events, ran.error)
    if result.error is not None:
        result.error.result = result
        raise result.error
    if result.summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return result


def _device_of(stages: Sequence[nn.Module], config: Config) -> torch.device:
    """`train.device`, where auto is where the stages are."""
    if config.train.device != "auto":
        return choose_device(config)
    for stage in stages:
        for parameter in stage.parameters():
            return parameter.device
    return torch.device("cpu")

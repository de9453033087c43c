"""The peers of the real mesh: what anyone would train the same model with, had AsyncMesh not been.

Owns two ways of doing the work of one replica, in seconds of the steady state. `plain_loop` is the
whole model in one process: a loop over microbatches, as in any tutorial; it has no pipeline, so it
is what a machine can do without one. `schedule_1f1b` is PyTorch's own pipeline,
torch.distributed.pipelining's Schedule1F1B over gloo, one process a stage: what a synchronous
pipeline that flushes at every update does on the same processes and links.

Both compute what the mesh computes: the stages of `build_stage` with the same initial weights, the
microbatches of `Batches` in the same order and drawn inside the loop as the mesh draws them, the
mean gradient of pipeline.accumulation microbatches, clipping (per stage, as each peer has stages)
and torch.optim.NAdam. The learning rate is constant: its schedule is no work. Both run on CPUs in
float32, uncompiled, and refuse settings that would mean other work.

    python -m benchmarks.peers plain --threads 2 --model.width=256
    python -m benchmarks.peers 1f1b --mesh.stages=2 --pipeline.accumulation=4
    python -m benchmarks.peers --check                # do both come to the same losses?
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import spawn

from asyncmesh.config import Config
from asyncmesh.configuration import collect
from asyncmesh.data.sampler import open_data
from asyncmesh.device import choose_device
from asyncmesh.errors import AsyncMeshError, ConfigError
from asyncmesh.model.gpt import build_stage, cross_entropy
from asyncmesh.model.splitting import split

Measured = tuple[float, list[float]]  # seconds; the last stage's losses, the warm-up's first

WARM_UP = 3  # updates: moments, buffers, connections and the schedule's first exchange of shapes
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
TOLERANCE = 1e-5  # relative, of a loss; float32 sums in another order
CHECKED_UPDATES = 8
CHECKED = [  # no clipping: a norm over the model is not a norm over a stage
    *("model.layers=4", "model.width=32", "model.heads=2", "model.context=32"),
    *("pipeline.microbatch_size=2", "pipeline.accumulation=4", "optimizer.max_grad_norm=0"),
]


def plain_loop(config: Config, updates: int, threads: int) -> float:
    """Seconds that `updates` updates of the whole model take in this process."""
    return _run_plain(config, updates, threads)[0]


def schedule_1f1b(config: Config, updates: int, threads: int) -> float:
    """Seconds that `updates` updates take `mesh.stages` processes of `threads` threads each."""
    return _run_1f1b(config, updates, threads)[0]


class _Peer:
    """A stage (or the whole model: the stage of one), its data and its optimiser."""

    def __init__(self, config: Config, stages: int, stage: int) -> None:
        data, o = open_data(config), config.optimizer
        self.config, self.batches = config, data.batches
        self.module: nn.Module = build_stage(config.model, data.vocab, stages, stage, config.seed)
        self.losses: list[Tensor] = []  # of every microbatch, each divided by accumulation
        self.optimizer = torch.optim.NAdam(
            self.module.parameters(),
            lr=o.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=o.epsilon,
            momentum_decay=o.momentum_decay,
            weight_decay=o.weight_decay,
            decoupled_weight_decay=True,
        )

    def accumulate(self, microbatches: range) -> None:
        """Forward and backward of an update's microbatches."""
        raise NotImplementedError

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """So scaled that the gradients add up to their mean."""
        return cross_entropy(logits, target) / self.config.pipeline.accumulation

    def measure(self, updates: int, meet: Callable[[], object] = lambda: None) -> Measured:
        """The steady state: what comes between two meetings of all ranks, after the warm-up."""
        for index in range(WARM_UP):
            self._update(index)
        meet()
        began_s = time.perf_counter()
        for index in range(WARM_UP, WARM_UP + updates):
            self._update(index)
        meet()
        seconds = time.perf_counter() - began_s
        losses = torch.tensor(self.losses).view(-1, self.config.pipeline.accumulation)
        return seconds, losses.sum(1).tolist()

    def _update(self, index: int) -> None:
        accumulation = self.config.pipeline.accumulation
        max_norm = self.config.optimizer.max_grad_norm
        self.optimizer.zero_grad(set_to_none=True)
        self.accumulate(range(index * accumulation, (index + 1) * accumulation))
        if max_norm > 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        self.optimizer.step()


class _Plain(_Peer):
    """The whole model, microbatch after microbatch."""

    def accumulate(self, microbatches: range) -> None:
        for microbatch in microbatches:
            x, target = self.batches(0, microbatch)
            loss = self.loss(self.module(x), target)
            loss.backward()  # type: ignore[no-untyped-call]
            self.losses.append(loss.detach())


class _Stage(_Peer):
    """One rank's stage under PyTorch's schedule."""

    def __init__(self, config: Config, rank: int) -> None:
        super().__init__(config, config.mesh.stages, rank)
        stage = PipelineStage(self.module, rank, config.mesh.stages, torch.device("cpu"))
        # The schedule's own scaling is a pass over all gradients; the loss is one number.
        self.schedule = Schedule1F1B(
            stage, config.pipeline.accumulation, loss_fn=self.loss, scale_grads=False
        )
        self.is_first, self.is_last = stage.is_first, stage.is_last

    def accumulate(self, microbatches: range) -> None:
        inputs, target, losses = [], None, list[Tensor]()
        if self.is_first or self.is_last:
            # The schedule wants them in one piece, and cuts it into the same microbatches again.
            drawn = [self.batches(0, microbatch) for microbatch in microbatches]
            inputs = [torch.cat([x for x, _ in drawn])] if self.is_first else []
            target = torch.cat([wanted for _, wanted in drawn]) if self.is_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        self.losses += [loss.detach() for loss in losses]


def _run_plain(config: Config, updates: int, threads: int) -> Measured:
    _require_this_work(config)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _Plain(config, stages=1, stage=0).measure(updates)
    finally:
        torch.set_num_threads(before)


def _run_1f1b(config: Config, updates: int, threads: int) -> Measured:
    _require_this_work(config)
    stages, accumulation = config.mesh.stages, config.pipeline.accumulation
    split(config.model, open_data(config).vocab, stages)  # what is wrong is said here, in one line
    if accumulation < stages:
        raise ConfigError(
            "pipeline.accumulation",
            accumulation,
            f"Schedule1F1B needs at least mesh.stages = {stages} microbatches an update",
            f"try pipeline.accumulation={stages}",
        )
    with tempfile.TemporaryDirectory(prefix="asyncmesh-peers-") as folder:
        arguments = (config, updates, threads, folder)
        spawn(_run_rank, arguments, nprocs=stages)  # type: ignore[no-untyped-call]
        told = [json.loads(_answer(folder, rank).read_text()) for rank in range(stages)]
    return max(seconds for seconds, _ in told), told[-1][1]


def _run_rank(rank: int, config: Config, updates: int, threads: int, folder: str) -> None:
    """A process of the pipeline."""
    torch.set_num_threads(threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    stages, meeting_place = config.mesh.stages, f"file://{folder}/store"
    dist.init_process_group("gloo", meeting_place, rank=rank, world_size=stages)
    measured = _Stage(config, rank).measure(updates, dist.barrier)
    _answer(folder, rank).write_text(json.dumps(measured))
    dist.destroy_process_group()


def _answer(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.json"


def _require_this_work(config: Config) -> None:
    """That the settings ask for nothing which the peers would leave out."""
    needed: list[tuple[str, object, object]] = [
        ("optimizer.name", config.optimizer.name, "nadamw"),
        ("optimizer.error_feedback", config.optimizer.error_feedback, False),
        ("train.dtype", config.train.dtype, "float32"),
        ("train.compile", config.train.compile, False),
        ("train.device", choose_device(config).type, "cpu"),
        ("compute.emulated", config.compute.emulated, False),
    ]
    for setting, value, wanted in needed:
        if value != wanted:
            told = json.dumps(wanted)
            raise ConfigError(setting, value, f"the peers only do {told}", f"give {setting}={told}")


def _check(config: Config) -> bool:
    """Whether both come to the same losses; prints them."""
    plain, pipeline = (run(config, CHECKED_UPDATES, 1)[1] for run in (_run_plain, _run_1f1b))
    pairs = list(zip(plain, pipeline, strict=True))
    for a, b in pairs:
        print(f"  {a:.7f}  {b:.7f}")
    agree = all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in pairs)
    print(f"plain loop and Schedule1F1B {'agree' if agree else 'DIFFER'} (to {TOLERANCE:g})")
    return agree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("peer", nargs="?", choices=("plain", "1f1b"))
    parser.add_argument("--check", action="store_true", help="do both come to the same losses?")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    chosen, assignments = parser.parse_known_args()
    try:
        if chosen.check:
            return 0 if _check(collect(None, None, [*CHECKED, *assignments]).config()) else 1
        if chosen.peer is None:
            parser.error("name a peer, plain or 1f1b, or give --check")
        config = collect(None, None, assignments).config()
        run = plain_loop if chosen.peer == "plain" else schedule_1f1b
        seconds = run(config, chosen.updates, chosen.threads)
    except AsyncMeshError as error:
        print(f"peers: {error}", file=sys.stderr)
        return error.exit_code
    p = config.pipeline
    tokens = chosen.updates * p.accumulation * p.microbatch_size * config.model.context
    figures = {"peer": chosen.peer, "updates": chosen.updates, "threads": chosen.threads}
    print(json.dumps({**figures, "seconds": seconds, "tokens_per_second": tokens / seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

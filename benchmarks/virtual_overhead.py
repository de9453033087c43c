"""What simulating a pipeline of 8 stages costs over a plain synchronous PyTorch loop.

Same model, same batches, same optimiser; the plain loop runs the whole model as one module. The two
take turns (see paired.py). The virtual mesh computes exactly as many forwards, backwards and
updates. Every turn of the mesh is a whole run, so the memory that a run takes at first (versions,
moments) is touched anew each time; the turns are long enough for that not to be what is measured.

    python -m benchmarks.virtual_overhead                 # 10M parameters, CPU
    python -m benchmarks.virtual_overhead --preset gpu    # GPT-2 small, bf16, compiled, one GPU
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from asyncmesh.config import Config
from asyncmesh.device import choose_device
from asyncmesh.model.gpt import build_stages, cross_entropy
from asyncmesh.model.splitting import stage_costs
from asyncmesh.simulator.run import Job, build_programs, run_job
from benchmarks.paired import ratios, write_result

PRESETS = {
    "cpu": {
        "train": {"updates": 40, "device": "cpu"},
        "pipeline": {"microbatch_size": 8},
        "model": {"layers": 8, "width": 320, "heads": 5, "context": 256, "vocab": 256},
    },
    "gpu": {
        "train": {"updates": 150, "device": "cuda", "dtype": "bfloat16", "compile": True},
        "pipeline": {"microbatch_size": 8},
        "model": {"layers": 12, "width": 768, "heads": 12, "context": 1024, "vocab": 50257},
    },
}


class Batches:
    """Random tokens, made before anything is timed."""

    def __init__(self, config: Config, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (4, config.pipeline.microbatch_size, config.model.context + 1)
        vocab = config.model.vocab or 256
        self._tokens = torch.randint(vocab, shape, generator=generator).to(device)

    def __call__(self, replica: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._tokens[microbatch % len(self._tokens)]
        return rows[:, :-1], rows[:, 1:]


class PlainLoop:
    """The whole model and torch.optim.NAdam, as anyone would write it."""

    def __init__(self, config: Config, device: torch.device, batches: Batches) -> None:
        self.config, self.device, self.batches = config, device, batches
        vocab = config.model.vocab or 256
        (module,) = build_stages(config.model, vocab, 1, config.seed)
        self.module: nn.Module = module.to(device)
        self.run = torch.compile(self._loss) if config.train.compile else self._loss
        o = config.optimizer
        self.optimizer = torch.optim.NAdam(
            self.module.parameters(),
            lr=o.learning_rate,
            betas=(config.beta1, config.beta2),
            momentum_decay=o.momentum_decay,
            weight_decay=o.weight_decay,
            decoupled_weight_decay=True,
        )

    def _loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.module(x), target)

    def __call__(self) -> float:
        began_s = time.perf_counter()
        bfloat16 = self.config.train.dtype == "bfloat16"
        for microbatch in range(self.config.train.updates):
            x, target = self.batches(0, microbatch)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
                loss = self.run(x, target)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.module.parameters(), self.config.optimizer.max_grad_norm)
            self.optimizer.step()
        float(loss.detach())
        _wait(self.device)
        return time.perf_counter() - began_s


class VirtualMesh:
    """The same work on 8 virtual stages; compiled once, built anew for every repetition."""

    def __init__(self, config: Config, device: torch.device, batches: Batches) -> None:
        vocab = config.model.vocab or 256
        stages = build_stages(config.model, vocab, config.mesh.stages, config.seed)
        costs = stage_costs(config.model, vocab, config.mesh.stages)
        on_device = [stage.to(device) for stage in stages]
        self.job = Job(config, on_device, cross_entropy, batches, device, stage_costs=costs)
        self.programs = build_programs(self.job)

    def __call__(self) -> float:
        result = run_job(self.job, lambda event: None, programs=self.programs)
        if result.error is not None:
            raise result.error
        return float(result.summary["wall_seconds"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--repetitions", type=int, default=7)
    chosen = parser.parse_args()
    config = Config.from_dict(
        {
            **PRESETS[chosen.preset],
            "mesh": {"stages": 8, "replicas": 1},
            "averaging": {"method": "none"},
            "optimizer": {"warmup_updates": 0, "schedule": "constant"},
        }
    )
    device = choose_device(config)
    batches = Batches(config, device)
    plain, mesh = PlainLoop(config, device, batches), VirtualMesh(config, device, batches)
    parameters = sum(p.numel() for p in plain.module.parameters())
    print(f"{parameters:,} parameters; {config.train.updates} updates a turn; plain, virtual mesh:")
    figures = ratios(plain, mesh, chosen.repetitions)
    print(f"virtual mesh / plain loop: {figures['median_ratio']:.3f} (median)")
    write_result(
        f"virtual_overhead_{chosen.preset}",
        {"parameters": parameters, "updates": config.train.updates, "required": 1.15, **figures},
    )


if __name__ == "__main__":
    main()

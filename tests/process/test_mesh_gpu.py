"""Real meshes on a GPU, whose workers share it; and one of a GPU and a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from asyncmesh.runtime.frames import Frame, Kind
from asyncmesh.runtime.staging import CudaStaging, Staging
from meshes import TINY, command, run, started, wait_for_line

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_tensor_crosses_between_devices_with_the_bits_that_its_dtype_keeps() -> None:
    gpu, cpu = CudaStaging(torch.device("cuda")), Staging()
    payload = torch.randn(64, 33, device="cuda")
    payload.mul_(3)  # still queued when it is packed
    frame = Frame(Kind.ACTIVATION, 7, 9, 1.5, payload)
    as_it_is = payload_of(cpu.unpack(gpu.pack(frame, None, gpu.ready())))
    assert torch.equal(as_it_is, payload.cpu())
    narrow = payload_of(cpu.unpack(gpu.pack(frame, torch.bfloat16, gpu.ready())))
    assert torch.equal(narrow, payload.bfloat16().float().cpu())
    there = Frame(Kind.GRADIENT, 7, 9, 1.5, payload.cpu())
    back = payload_of(gpu.unpack(cpu.pack(there, torch.bfloat16, None)))
    assert back.is_cuda
    assert torch.equal(back, payload.bfloat16().float())


def payload_of(frame: Frame) -> torch.Tensor:
    assert frame.payload is not None
    return frame.payload


def test_workers_share_a_gpu_and_come_to_the_loss_of_a_cpu_run(tmp_path: Path) -> None:
    common = [*TINY, "--train.updates=30", "--train.eval_every=30", "--averaging.delay=2"]
    on_gpu = [*common, "--train.device=cuda", "--pipeline.wire_dtype=float32"]
    for name, settings in (("cpu", common), ("gpu", on_gpu)):
        done = run("train", *settings, f"--output_dir={tmp_path}/{name}", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    losses = [
        json.loads((tmp_path / name / "summary.json").read_text())["final_val_loss"]
        for name in ("cpu", "gpu")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    events = (tmp_path / "gpu" / "events" / "stage-1-replica-1.jsonl").read_text()
    assert '"device": "cuda:0"' in events


def test_what_a_gpu_sends_is_bfloat16_by_default(tmp_path: Path) -> None:
    settings = [*TINY, "--train.device=cuda", f"--output_dir={tmp_path}/run"]
    assert run("train", *settings, folder=tmp_path).returncode == 0
    events = (tmp_path / "run" / "events" / "stage-0-replica-0.jsonl").read_text()
    sizes = {int(size) for size in re.findall(r'"activation", .*"bytes": (\d+)', events)}
    assert sizes == {128 + 2 * 2 * 16 * 16}  # header, bytes, sequences, context, width


def test_one_replica_on_a_gpu_and_one_on_the_cpu(tmp_path: Path) -> None:
    arguments = command("coordinator", "--port=7414", *TINY, f"--output_dir={tmp_path}/run")
    join = command("join", "--coordinator=127.0.0.1:7414")
    with started(arguments, tmp_path) as coordinator:
        wait_for_line(coordinator, "asyncmesh join")
        on_gpu = [*join, "--replica=0", "--train.device=cuda", f"--log-dir={tmp_path}/a"]
        on_cpu = [*join, "--replica=1", "--train.device=cpu", f"--log-dir={tmp_path}/b"]
        with started(on_gpu, tmp_path), started(on_cpu, tmp_path):
            said = coordinator.communicate(timeout=100)[0]
    assert coordinator.returncode == 0, said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"]["completed"] > 0


def test_a_pipeline_of_a_gpu_stage_and_a_cpu_stage(tmp_path: Path) -> None:
    settings = [*TINY, "--mesh.replicas=1", f"--output_dir={tmp_path}/run"]
    join = command("join", "--coordinator=127.0.0.1:7415", "--replica=0")
    with started(command("coordinator", "--port=7415", *settings), tmp_path) as coordinator:
        wait_for_line(coordinator, "asyncmesh join")
        on_gpu = [*join, "--stages=0", "--train.device=cuda", f"--log-dir={tmp_path}/a"]
        on_cpu = [*join, "--stages=1", "--train.device=cpu", f"--log-dir={tmp_path}/b"]
        with started(on_gpu, tmp_path), started(on_cpu, tmp_path):
            said = coordinator.communicate(timeout=100)[0]
    assert coordinator.returncode == 0, said

"""Real meshes on this machine: what they compute, leave behind and say when something is wrong."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncmesh.checkpoint.weights import load_newest
from meshes import (
    TINY,
    assert_nothing_is_left,
    command,
    hosts,
    processes_of,
    run,
    started,
    wait_for_line,
)


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of 2 × 2 processes, averaged in the background."""
    folder = tmp_path_factory.mktemp("mesh")
    done = run("train", *TINY, f"--output_dir={folder}/run", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # plain lines where there is no terminal
    assert_nothing_is_left(folder)
    return folder / "run"


def test_a_run_leaves_everything_of_the_contract(finished: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "report.html", "summary.json"):
        assert (finished / name).stat().st_size > 0
    assert len(list((finished / "events").glob("stage-*-replica-*.jsonl"))) == 4
    assert len(list((finished / "logs").glob("stage-*-replica-*.log"))) == 4
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["clock"] == "real"
    assert summary["updates"] == 8
    assert summary["replicas_lost"] == []
    assert summary["tokens"] == 8 * 2 * 2 * 2 * 16  # updates, k, replicas, sequences, context
    assert [point["update"] for point in summary["val_curve"]] == [4, 8]
    assert len(summary["final_replica_val_losses"]) == 2
    assert summary["consensus_distance"] > 0
    assert summary["rounds"]["completed"] > 0
    assert all(0 < busy <= 1 for busy in summary["busy_fraction"].values())
    written = run("generate", str(finished), "--tokens=5", "--prompt=ab", folder=finished)
    assert written.stdout.startswith("ab")


def test_its_replay_is_bit_identical(finished: Path) -> None:
    done = run("replay", str(finished), folder=finished)
    assert done.returncode == 0, done.stderr
    assert "bit-identical: 8 digests of 4 workers" in done.stdout


def test_a_replay_notices_a_record_that_was_changed(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished, copy], check=True)
    events = copy / "events" / "stage-1-replica-0.jsonl"
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    merge = next(line for line in lines if line["event"] == "merge")
    merge["contributors"] = merge["contributors"][:1]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("replay", str(copy), folder=tmp_path)
    assert done.returncode == 1
    assert "digests differ, first that of stage 1 of replica 0 after update" in done.stderr


# Every averaging method and every schedule; a fixed delay makes the two worlds the same run.
KINDS = [
    ("async-momentum", "async", ["--averaging.delay=2"]),
    ("async-ema", "async", ["--averaging.delay=1", "--pipeline.wire_dtype=bfloat16"]),
    ("async-delta", "1f1b", ["--averaging.delay=2", "--averaging.wire_dtype=bfloat16"]),
    ("async-overwrite", "gpipe", ["--averaging.delay=2", "--mesh.replicas=3"]),
    ("sparta", "async", ["--optimizer.name=muon", "--mesh.stages=3", "--model.layers=3"]),
    ("allreduce", "1f1b", ["--model.dropout=0.2", "--mesh.replicas=3"]),
    ("diloco", "async", ["--averaging.interval=3", "--pipeline.extra_depth=2"]),
    ("local-sgd", "gpipe", ["--averaging.interval=2", "--optimizer.name=sgd"]),
    ("none", "async", ["--mesh.stages=1", "--optimizer.name=adamw"]),
]


@pytest.mark.parametrize(("method", "schedule", "more"), KINDS, ids=[kind[0] for kind in KINDS])
def test_a_real_run_computes_the_simulators_bits(
    method: str, schedule: str, more: list[str], tmp_path: Path
) -> None:
    settings = [*TINY, f"--averaging.method={method}", f"--pipeline.schedule={schedule}", *more]
    real = run("train", *settings, "--output_dir=real", folder=tmp_path)
    assert real.returncode == 0, real.stderr
    virtual = run(
        "simulate", "--preset=default", *settings, "--output_dir=virtual", folder=tmp_path
    )
    assert virtual.returncode == 0, virtual.stderr
    of_real, of_virtual = (load_newest(tmp_path / name) for name in ("real", "virtual"))
    assert of_real.keys() == of_virtual.keys()
    for name, tensor in of_real.items():
        assert torch.equal(tensor, of_virtual[name]), name
    curves = [summary_of(tmp_path / name)["final_val_loss"] for name in ("real", "virtual")]
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


LONG = [*TINY, "--train.updates=100000", "--train.eval_every=50000"]


def test_ctrl_c_once_saves_and_stops(tmp_path: Path) -> None:
    with started(command("train", *LONG, f"--output_dir={tmp_path}/run"), tmp_path) as process:
        wait_for_line(process, "training begins")
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    assert "saving and stopping" in said
    summary = summary_of(tmp_path / "run")
    assert summary["status"] == "interrupted"
    assert summary["final_val_loss"] is not None
    assert load_newest(tmp_path / "run")
    assert_nothing_is_left(tmp_path)
    replayed = run("replay", f"{tmp_path}/run", folder=tmp_path)
    assert "bit-identical" in replayed.stdout, replayed.stderr


def test_ctrl_c_twice_stops_now(tmp_path: Path) -> None:
    slow = ["--compute.emulated=true", "--compute.forward_ms=60000"]
    arguments = command("train", *LONG, *slow, f"--output_dir={tmp_path}/run")
    with started(arguments, tmp_path) as process:
        wait_for_line(process, "training begins")
        process.send_signal(signal.SIGINT)
        wait_for_line(process, "Ctrl-C again to stop now")
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert time.monotonic() - began < 15
    assert process.returncode == 130
    assert summary_of(tmp_path / "run")["status"] == "interrupted"
    assert_nothing_is_left(tmp_path)


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    with started(command("train", *LONG, f"--output_dir={tmp_path}/run"), tmp_path) as process:
        wait_for_line(process, "training begins")
        assert len(processes_of(tmp_path)) > 6  # itself, two torchruns, four workers
        process.kill()
        process.wait()
        assert_nothing_is_left(tmp_path)


def test_nothing_listens_but_on_loopback(tmp_path: Path) -> None:
    with started(command("train", *LONG, f"--output_dir={tmp_path}/run"), tmp_path) as process:
        wait_for_line(process, "training begins")
        addresses = listening_addresses(tmp_path)
        process.send_signal(signal.SIGKILL)
    assert len(addresses) > 4
    assert set(addresses) == {"127.0.0.1"}


def listening_addresses(folder: Path) -> list[str]:
    """Of all sockets of all processes that work for runs in a folder."""
    sockets = set()
    for process in processes_of(folder):
        with suppress(OSError):  # it has ended
            sockets |= {str(link.readlink()) for link in Path(f"/proc/{process}/fd").iterdir()}
    found = []
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(_readable(fields[1].split(":")[0], width))
    return found


def _readable(hexadecimal: str, width: int) -> str:
    if width == 32:
        return "any IPv6" if int(hexadecimal, 16) == 0 else hexadecimal
    return ".".join(str(byte) for byte in bytes.fromhex(hexadecimal)[::-1])


def test_a_lost_replica_is_told_of_and_left_behind(tmp_path: Path) -> None:
    settings = [*TINY, "--train.updates=400", "--train.eval_every=400"]
    with started(command("train", *settings, f"--output_dir={tmp_path}/run"), tmp_path) as process:
        wait_for_line(process, "training begins")
        os.kill(a_worker_of(tmp_path, "--replica=1"), signal.SIGKILL)
        said = process.communicate(timeout=100)[0]
    assert process.returncode == 0, said
    assert re.search(r"lost: stage \d of replica 1", said)
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["replicas_lost"]) == ("completed", [1])
    assert summary["updates"] == 400
    assert summary["final_val_loss"] is not None


def a_worker_of(folder: Path, option: str) -> int:
    """The process id of one worker (not of torchrun, nor of what started it)."""
    return next(
        number
        for number, arguments in processes_of(folder).items()
        if "asyncmesh.worker" in arguments
        and option in arguments
        and "asyncmesh.runtime.job" not in arguments
    )


def test_a_full_disk_ends_the_run_in_one_line(tmp_path: Path) -> None:
    """A limit on the size of files does to a writer what a full disk does."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    done = subprocess.run(
        command("train", *LONG, f"--output_dir={tmp_path}/run"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=small_files,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert "cannot be recorded (File too large)" in line
    assert_nothing_is_left(tmp_path)


# -- coordinator and join -------------------------------------------------------------------------
def test_what_can_be_wrong_with_a_join_is_told_in_one_line(tmp_path: Path) -> None:
    arguments = command("coordinator", "--port=7411", "--mesh.replicas=1", *LONG)
    with started([*arguments, f"--output_dir={tmp_path}/run"], tmp_path) as coordinator:
        wait_for_line(coordinator, "asyncmesh join --coordinator 127.0.0.1:7411")
        for options, words in (
            (["--replica=1"], "--replica 1: this mesh has mesh.replicas = 1"),
            (["--replica=0", "--stages=1-2"], "--stages 1-2: this mesh has mesh.stages = 2"),
            (["--replica=0", "--stages=x"], "--stages x: must be A-B"),
            (["--replica=0", "--model.width=32"], "model.width = 32 here, 16 at the coordinator"),
            (["--replica=0", "--seed=4", "--model.heads=1"], "seed = 4 here, 0 at the coordinator"),
        ):
            assert words in one_line_of_join("127.0.0.1:7411", options, tmp_path)
        again = run("coordinator", "--port=7411", "--output_dir=other", folder=tmp_path)
        assert again.returncode == 2
        assert "127.0.0.1:7411: the port is in use" in again.stderr
        assert not (tmp_path / "other").exists()
        join = command("join", "--coordinator=127.0.0.1:7411", "--replica=0", "--stages=0-0")
        with started([*join, f"--log-dir={tmp_path}/logs"], tmp_path):
            wait_for_line(coordinator, "waiting for stage 1 of replica 0")
            said = one_line_of_join("127.0.0.1:7411", ["--replica=0", "--stages=0"], tmp_path)
            assert "stage 0 of replica 0 is already taken by" in said
    assert_nothing_is_left(tmp_path)


def one_line_of_join(coordinator: str, options: list[str], folder: Path) -> str:
    done = run("join", f"--coordinator={coordinator}", *options, folder=folder)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return str(line)


def test_a_coordinator_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    said = one_line_of_join("127.0.0.1:9", ["--replica=0"], tmp_path)
    assert "coordinator 127.0.0.1:9: cannot be reached" in said
    said = one_line_of_join("somewhere", ["--replica=0"], tmp_path)
    assert "must be HOST:PORT" in said


def test_a_stage_that_nobody_takes_ends_the_wait(tmp_path: Path) -> None:
    arguments = command("coordinator", "--port=7412", "--patience=8", "--mesh.replicas=1", *TINY)
    with started([*arguments, f"--output_dir={tmp_path}/run"], tmp_path) as coordinator:
        wait_for_line(coordinator, "asyncmesh join")
        join = command("join", "--coordinator=127.0.0.1:7412", "--replica=0", "--stages=0-0")
        with started([*join, f"--log-dir={tmp_path}/logs"], tmp_path) as joined:
            said = coordinator.communicate(timeout=60)[0]
            assert "nobody came for stage 1 of replica 0 within 8 s" in said
            assert coordinator.returncode == 2
            of_join = joined.communicate(timeout=60)[0]
            assert "the coordinator ended the run before it began" in of_join
            assert joined.returncode == 2
    assert_nothing_is_left(tmp_path)


def test_a_replica_that_comes_back_gets_its_weights_from_a_peer(tmp_path: Path) -> None:
    arguments = command("coordinator", "--port=7413", *LONG, f"--output_dir={tmp_path}/run")
    join = command("join", "--coordinator=127.0.0.1:7413")
    with started(arguments, tmp_path) as coordinator:
        wait_for_line(coordinator, "asyncmesh join")
        with started([*join, "--replica=0", f"--log-dir={tmp_path}/a"], tmp_path) as stays:
            with started([*join, "--replica=1", f"--log-dir={tmp_path}/b"], tmp_path) as lost:
                wait_for_line(coordinator, "training begins")
                os.kill(a_worker_of(tmp_path, "--replica=1"), signal.SIGKILL)
                assert lost.wait(timeout=30) == 2
            wait_for_line(coordinator, "lost: ")
            with started([*join, "--replica=1", f"--log-dir={tmp_path}/c"], tmp_path) as back:
                wait_for_line(coordinator, "back: ")
                wait_for_line(coordinator, "back: ")
                coordinator.send_signal(signal.SIGINT)
                said = coordinator.communicate(timeout=100)[0]
                assert (stays.wait(timeout=20), back.wait(timeout=20)) == (0, 0)
    logs = [(tmp_path / "c" / f"stage-{stage}-replica-1.log").read_text() for stage in (0, 1)]
    updates = {re.search(r"goes on after update (\d+)", log)[1] for log in logs}  # type: ignore[index]
    assert len(updates) == 1  # both stages begin with the same one
    assert int(updates.pop()) > 0
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["replicas_lost"]) == ("interrupted", []), said
    assert summary["consensus_distance"] < 0.1


# -- hosts ----------------------------------------------------------------------------------------
def test_two_hosts_of_two_stages_train_and_replay(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        arguments = command("coordinator", "--bind", a.address, *TINY)
        with started([*arguments, f"--output_dir={tmp_path}/run"], tmp_path, a) as coordinator:
            said = wait_for_line(coordinator, "asyncmesh join")
            assert f"listening on {a.address}: whoever can reach it" in said
            join = command("join", "--coordinator", f"{a.address}:7400")
            with (
                started([*join, "--replica=0", f"--log-dir={tmp_path}/a"], tmp_path, a),
                started([*join, "--replica=1", f"--log-dir={tmp_path}/b"], tmp_path, b),
            ):
                said = coordinator.communicate(timeout=100)[0]
    assert coordinator.returncode == 0, said
    summary = summary_of(tmp_path / "run")
    assert (summary["status"], summary["updates"]) == ("completed", 8)
    replayed = run("replay", f"{tmp_path}/run", folder=tmp_path)
    assert "bit-identical: 8 digests of 4 workers" in replayed.stdout, replayed.stderr


def test_a_pipeline_may_cross_hosts(tmp_path: Path) -> None:
    with hosts(2) as (a, b):
        settings = [*TINY, "--mesh.replicas=1"]
        arguments = command("coordinator", "--bind", a.address, *settings)
        with started([*arguments, f"--output_dir={tmp_path}/run"], tmp_path, a) as coordinator:
            wait_for_line(coordinator, "asyncmesh join")
            join = command("join", "--coordinator", f"{a.address}:7400", "--replica=0")
            with (
                started([*join, "--stages=0", f"--log-dir={tmp_path}/a"], tmp_path, a),
                started([*join, "--stages=1", f"--log-dir={tmp_path}/b"], tmp_path, b),
            ):
                said = coordinator.communicate(timeout=100)[0]
    assert coordinator.returncode == 0, said
    assert summary_of(tmp_path / "run")["status"] == "completed"
    replayed = run("replay", f"{tmp_path}/run", folder=tmp_path)
    assert "bit-identical" in replayed.stdout, replayed.stderr


# -- uneven machines ------------------------------------------------------------------------------
def test_a_slow_replica_does_not_slow_another_one(tmp_path: Path) -> None:
    """With emulated compute, so that the times are known: 12 ms an update, or four times that."""
    emulated = [
        *("--compute.emulated=true", "--compute.forward_ms=4", "--compute.backward_ms=8"),
        *("--compute.update_ms=0", "--mesh.stages=1", "--pipeline.accumulation=1"),
        *("--train.updates=150", "--compute.replica_slowdown=[1.0,4.0]"),
    ]
    done = run("train", *TINY, *emulated, f"--output_dir={tmp_path}/run", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    seconds = [update_seconds(tmp_path / "run", replica) for replica in (0, 1)]
    assert seconds[0] < 1.5 * 150 * 0.012
    assert seconds[1] > 150 * 0.048
    rounds = summary_of(tmp_path / "run")["rounds"]
    assert rounds["completed"] > 0
    assert rounds["skipped"] > 0  # the fast one's, while the slow one had yet to come


def update_seconds(run_folder: Path, replica: int) -> float:
    """From the first forward of a replica to its last update."""
    lines = (run_folder / "events" / f"stage-0-replica-{replica}.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    began = min(event["start_s"] for event in events if event["event"] == "forward")
    ended = max(event["end_s"] for event in events if event["event"] == "update")
    return float(ended - began)

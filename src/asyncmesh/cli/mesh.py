"""`train`, `coordinator` and `join`: the real mesh, on one machine or on several.

Owns what the person at a terminal sees of it and how Ctrl-C ends it: once saves and stops, twice
stops now. Invariant: when a command ends, none of the processes that it started is left.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncmesh.cli.settings import (
    PASS_SETTINGS_ON,
    Preset,
    PrintConfig,
    Settings,
    print_config,
    read,
)
from asyncmesh.config import Config

if TYPE_CHECKING:
    from asyncmesh.runtime.launch import ReplicaJob
    from asyncmesh.runtime.run import MeshRun

LOOPBACK = "127.0.0.1"
_PORT = 7400  # where a coordinator listens unless told otherwise


def add_to(app: typer.Typer) -> None:
    for command in (train, coordinator, join):
        app.command(context_settings=PASS_SETTINGS_ON)(command)


def train(
    settings: Settings = None, preset: Preset = None, show_config: PrintConfig = False
) -> None:
    """Train a model on a real mesh of processes on this machine."""
    layers = read(settings, preset or "default")
    config = layers.config().on_a_real_mesh()
    if show_config:
        return print_config(layers, config)
    summary, folder = run_mesh(config)
    return _present(summary, folder, sample=not config.compute.emulated)


def coordinator(
    settings: Settings = None,
    preset: Preset = None,
    show_config: PrintConfig = False,
    bind: Annotated[str, typer.Option(help="The address to listen on.")] = LOOPBACK,
    port: Annotated[int, typer.Option(min=1, max=65535)] = _PORT,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds to wait until every stage has its worker.")
    ] = 3600,
) -> None:
    """Coordinate a mesh over several machines; start `asyncmesh join` on each of them."""
    from asyncmesh.runtime.network import check_bindable

    layers = read(settings, preset or "default")
    config = layers.config().on_a_real_mesh()
    if show_config:
        return print_config(layers, config)
    check_bindable(bind)
    if bind not in (LOOPBACK, "localhost"):
        _say_what_is_exposed(bind)
    summary, folder = run_mesh(config, bind, port, here=False, patience_s=patience)
    return _present(summary, folder, sample=False)


def _say_what_is_exposed(address: str) -> None:
    print(
        f"listening on {address}: whoever can reach it can read and change this training run."
        " Nothing is encrypted and nobody is asked who they are. Use an address of a private"
        " network that you trust, or of a WireGuard network (asyncmesh wireguard writes one's"
        " configuration).",
        flush=True,
    )


def join(
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")],
    replica: Annotated[int, typer.Option(min=0, help="Which replica this host is part of.")],
    settings: Settings = None,
    stages: Annotated[
        str | None, typer.Option(help="A-B: which stages run here. Default: all.")
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="This host's address. Default: the one towards HOST.")
    ] = None,
    log_dir: Annotated[Path, typer.Option(help="Where the workers' logs go.")] = Path(
        "asyncmesh-logs"
    ),
    patience: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for a coordinator that is not there yet.")
    ] = 0,
) -> None:
    """Run stages of a replica on this host. Settings come from the coordinator.

    Only train.device and train.threads are this host's own.
    """
    from asyncmesh.errors import MeshError
    from asyncmesh.runtime.control import Control
    from asyncmesh.runtime.launch import ReplicaJob
    from asyncmesh.runtime.place import ask_for_places

    own = read(settings, None).values
    first, last = ask_for_places(coordinator, replica, stages, own, patience)
    job = ReplicaJob(
        coordinator=coordinator,
        replica=replica,
        first=first,
        last=last,
        log_folder=log_dir,
        settings=[f"--{name}={_as_toml(value)}" for name, value in own.items()],
        address=bind,
    )
    print(f"stages {first} to {last} of replica {replica}; logs: {log_dir}", flush=True)
    with started([job]):
        try:
            code = job.wait()
        finally:
            if job.exit_code() != 0:
                with suppress(MeshError):  # the coordinator may be what it died of
                    Control(coordinator).lost(job.lost())
        if code:
            raise MeshError(f"{job.reason()}; see {log_dir}")
    print("done")


def _as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Schedulers end a job with SIGTERM, and want of it what a person wants of Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def started(jobs: Sequence[ReplicaJob]) -> Iterator[None]:
    """The jobs run within, and none of them after."""
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_ctrl_c())
        for job in jobs:
            stack.callback(job.close)
            job.start()
        yield


def run_mesh(
    config: Config,
    address: str = LOOPBACK,
    port: int = 0,
    *,
    here: bool = True,
    patience_s: float = math.inf,
    folder: Path | None = None,
) -> tuple[dict[str, Any], Path]:
    """A whole run; answers its summary and folder. `here`: all workers run on this machine.

    `folder`: where it is recorded; default: where the configuration says.
    """
    from asyncmesh.cli.console import print_job
    from asyncmesh.cli.live import live_view
    from asyncmesh.data.sampler import open_data
    from asyncmesh.model.gpt import coordinates
    from asyncmesh.runtime.launch import ReplicaJob
    from asyncmesh.runtime.run import MeshRun

    data = open_data(config)
    parameters = sum(coordinates(config.model, data.vocab, config.mesh.stages))
    mesh = config.mesh
    with MeshRun(config, data, address, port, folder) as run:
        print_job(config, parameters, data)
        if not here:
            print(f"asyncmesh join --coordinator {run.coordinator.address} --replica R")
        jobs = [
            ReplicaJob(
                coordinator=run.coordinator.address,
                replica=replica,
                first=0,
                last=mesh.stages - 1,
                log_folder=run.path / "logs",
                address=address,
                host_workers=mesh.stages * mesh.replicas,
            )
            for replica in range(mesh.replicas if here else 0)
        ]
        with started(jobs), live_view(config, run.live, run.coordinator.roster) as view:
            _watch(run, jobs, view.show, patience_s)
        summary = run.conclude()
        summary["error"] = run.error()
    return summary, run.path


def _watch(run: MeshRun, jobs: Sequence[ReplicaJob], show: Any, patience_s: float) -> None:
    """Ctrl-C once: save and stop. Twice: stop now."""
    try:
        run.watch(jobs, show, patience_s)
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            run.stop()
            print("saving and stopping; Ctrl-C again to stop now", flush=True)
            run.watch(jobs, show)


def _present(summary: dict[str, Any], folder: Path, sample: bool) -> None:
    from asyncmesh.cli.results import print_sample, print_summary
    from asyncmesh.observe.report import write_report

    error = summary.pop("error")
    print_summary(summary)
    if sample and error is None and summary["status"] == "completed":
        print_sample(folder)
    print(f"report: {write_report(folder)}")
    if error is not None:
        raise error
    if summary["status"] == "interrupted":
        raise KeyboardInterrupt

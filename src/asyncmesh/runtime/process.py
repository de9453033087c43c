"""A worker's process, from its command line to its exit code.

Owns the order in which a worker comes and goes: it takes its place, builds its stage, connects to
its neighbours and peers, waits for the others, trains, hands over what is left, and leaves.
Invariant: however it ends, the coordinator is told if it can be, the full story is in the log file,
and one line of it in the error file that its launcher reads.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from asyncmesh.config import Config
from asyncmesh.data.sampler import Dataset, open_data
from asyncmesh.device import choose_device
from asyncmesh.engine import Engine, StageProgram
from asyncmesh.errors import AsyncMeshError, DivergedError, MeshError
from asyncmesh.model.gpt import build_stage, coordinates, cross_entropy
from asyncmesh.model.splitting import stage_costs
from asyncmesh.observe.events import Joined
from asyncmesh.protocol.pipeline import PipelinePlan
from asyncmesh.runtime.control import Control, Reporter
from asyncmesh.runtime.edges import Edge
from asyncmesh.runtime.emulated import EmulatedEngine
from asyncmesh.runtime.healing import agree_on_update, catch_up
from asyncmesh.runtime.membership import Membership
from asyncmesh.runtime.messages import Phase, Welcome
from asyncmesh.runtime.network import (
    Store,
    connect_store,
    part_of,
)
from asyncmesh.runtime.parent import die_with
from asyncmesh.runtime.place import Place, config_of, hello_of
from asyncmesh.runtime.rounds import Mean, Rounds
from asyncmesh.runtime.staging import staging_for
from asyncmesh.runtime.stopwatch import stopwatch_for
from asyncmesh.runtime.validation import Validation, in_microbatches
from asyncmesh.runtime.worker import MeshWorker, Surroundings

_log = logging.getLogger(__name__)
_NEIGHBOURS = timedelta(hours=24)  # may be started that much later
_GOODBYE_S = 10.0
_NEVER_BEGAN = "the coordinator ended the run before it began; its console says why"
ERRORS = "ASYNCMESH_ERRORS"  # the folder that a launcher reads
HOST_WORKERS = "ASYNCMESH_HOST_WORKERS"  # how many workers share this host's cores


def run_worker(place: Place, log_folder: Path) -> int:
    """The whole life of a worker; answers its exit code."""
    die_with(os.getppid(), signal.SIGKILL)
    name = f"stage-{place.stage}-replica-{place.replica}"
    _log_to(log_folder / f"{name}.log")
    try:
        _take_part(place)
    except DivergedError as error:
        _log.error("%s", error)
        return error.exit_code
    except AsyncMeshError as error:
        _log.error("%s", error, exc_info=True)
        leave_word(name, str(error))
        return error.exit_code
    except Exception as error:
        _log.exception("a defect")
        leave_word(name, told(error))
        return 1
    return 0


def _take_part(place: Place) -> None:
    control = Control(place.coordinator)
    welcome = control.hello(hello_of(place))
    config = config_of(welcome, place.settings)
    reporter = Reporter(control, place.job, place.stage, place.replica)
    phases = _Phases()
    reporter.start(phases.enter)
    try:
        worker = _Assembly(place, welcome, config, reporter)
        reporter.state("ready")
        phases.wait_until_running()
        worker.train(phases, control)
    except Exception as error:
        reporter.close("diverged" if isinstance(error, DivergedError) else "failed", told(error))
        raise
    reporter.close("finished")
    control.close()


class _Phases:
    """The run's phase as the reporting thread learns it."""

    def __init__(self) -> None:
        self._running = threading.Event()
        self._is_set_up = False
        self._stopping = threading.Event()
        self._on_stop: Callable[[], None] = self._stopping.set
        self._on_failure: Callable[[Exception], None] = lambda error: None

    def tell(self, worker: MeshWorker) -> None:
        """From now on, and what has been said already."""
        self._on_stop, self._on_failure = worker.on_stop, worker.on_failure
        if self._stopping.is_set():
            worker.on_stop()

    def enter(self, phase: Phase) -> None:
        if phase == "over" and not self._is_set_up:
            # The main thread may be waiting for a neighbour that will never come.
            _log.error("%s", _NEVER_BEGAN)
            leave_word("ended", _NEVER_BEGAN)
            logging.shutdown()
            os._exit(1)
        if phase == "over":
            self._on_failure(MeshError("the coordinator goes on without this worker"))
        if phase == "stopping":
            self._on_stop()
        if phase != "gathering":
            self._running.set()

    def wait_until_running(self) -> None:
        self._running.wait()
        self._is_set_up = True


class _Assembly:
    """A worker with everything around it."""

    def __init__(self, place: Place, welcome: Welcome, config: Config, reporter: Reporter) -> None:
        self._place, self._config, self._reporter = place, config, reporter
        self._device = torch.device("cpu") if config.compute.emulated else _device(config, place)
        torch.set_num_threads(_threads(config))
        data = open_data(config)
        if data.digest() != welcome.data:
            raise MeshError(
                f'data.source = "{config.data.source}" on this host holds other data than at the'
                " coordinator; copy the coordinator's file here (builtin is a text of Python's, and"
                " needs the same version of Python on all hosts)"
            )
        self._engine = _engine(config, place, data, self._device)
        self.worker = MeshWorker(config, place.stage, place.replica, self._engine, data.batches)
        self._welcome = welcome
        self._rounds, self._evaluations = self._memberships(welcome)
        self._prefix = f"replica-{place.replica}-attempt-{welcome.attempt}"
        self._downstream = self._edge(place.stage)
        self._upstream = self._edge(place.stage - 1)
        if isinstance(self._engine, Engine):
            self.worker.validation = Validation(
                self._engine,
                place.stage,
                config.mesh.stages,
                place.replica,
                in_microbatches(data.validation, config.pipeline.microbatch_size),
                self._send_downstream,
                reporter.tell,
                reporter.clock,
            )

    def _connect(self) -> Store:
        return connect_store(self._welcome.store, _NEIGHBOURS)

    def _edge(self, upstream: int) -> Edge | None:
        if not 0 <= upstream < self._config.mesh.stages - 1:
            return None

        def connect() -> Store:
            return part_of(self._connect(), self._prefix)

        return Edge(connect, upstream, self._place.stage, self._place.address)

    def _send_downstream(self, frame: Any) -> None:
        assert self._downstream is not None  # validation knows the ends
        self._downstream.send(frame, None, staging_for(self._device).ready())

    def _memberships(self, welcome: Welcome) -> tuple[Membership | None, Membership | None]:
        if self._config.mesh.replicas == 1:
            return None, None
        stage, replica, address = self._place.stage, self._place.replica, self._place.address
        averages = self._config.averaging.method != "none"
        evaluates = isinstance(self._engine, Engine)

        def member(name: str, lighthouses: list[str]) -> Membership:
            return Membership(
                f"{name}-{stage}", lighthouses[stage], self._connect, replica, address
            )

        return (
            member("rounds", welcome.rounds) if averages else None,
            member("evaluations", welcome.evaluations) if evaluates else None,
        )

    def _start(
        self,
        membership: Membership | None,
        on_mean: Callable[[Mean], None],
        alive: Callable[[], int] | None = None,
    ) -> Rounds | None:
        if membership is None:
            return None
        has_state = alive is None and not self._config.compute.emulated
        rounds = Rounds(
            membership,
            staging_for(self._device),
            self._reporter.clock,
            on_mean,
            self.worker.on_failure,
            alive,
            self.worker.state_after if has_state else None,
        )
        rounds.start()
        return rounds

    def _meet_the_others(self) -> int:
        """All begin together, or a late one gets a peer's state; answers its updates."""
        if self._welcome.running:
            return self._catch_up()
        if self._rounds is not None:
            self._rounds.meet_all(lambda: self._reporter.replicas_alive)
        return 0

    def _catch_up(self) -> int:
        config, stage = self._config, self._place.stage
        if self._rounds is None or not isinstance(self._engine, Engine):
            raise MeshError(
                f"replica {self._place.replica} comes late, and with averaging.method ="
                f" {config.averaging.method} no other replica can give it its weights; start the"
                " run again"
            )
        state, update, rounds = catch_up(self._rounds, self._engine)
        store = part_of(self._connect(), self._prefix)
        update = agree_on_update(store, stage, config.mesh.stages, update)
        self.worker.begin_late(state, update, rounds)
        _log.info("goes on after update %d and round %d", update, rounds)
        return update

    def train(self, phases: _Phases, control: Control) -> None:
        """From the start of the run to the end of this worker's part in it."""
        worker, place = self.worker, self._place
        update = self._meet_the_others()
        surroundings = Surroundings(
            upstream=self._upstream,
            downstream=self._downstream,
            rounds=self._start(self._rounds, worker.on_mean),
            evaluations=self._start(
                self._evaluations,
                worker.on_evaluation_mean,
                lambda: self._reporter.replicas_alive,
            ),
            staging=staging_for(self._device),
            stopwatch=stopwatch_for(self._device, self._reporter.clock),
            emit=self._reporter.emit,
        )
        edges = [edge for edge in (self._upstream, self._downstream) if edge is not None]
        for edge in edges:
            sending, receiving = staging_for(self._device), staging_for(self._device)
            edge.start(sending, receiving, worker.on_frame, worker.on_failure)
        phases.tell(worker)
        self._reporter.state("training")
        here = (place.stage, place.replica)
        self._reporter.emit(
            Joined(
                self._reporter.clock(), *here, update, str(self._device), torch.get_num_threads()
            )
        )
        worker.run(surroundings)
        for edge in edges:
            if not edge.close(_GOODBYE_S):
                _log.warning("%s did not say goodbye", edge.name)
        for rounds in (surroundings.rounds, surroundings.evaluations):
            if rounds is not None:
                rounds.close(_GOODBYE_S)
        self._hand_over(control)

    def _hand_over(self, control: Control) -> None:
        """The mean's weights, by the first of those that are in it."""
        mean, engine = self.worker.mean_of_the_end, self._engine
        if (
            mean is None
            or not isinstance(engine, Engine)
            or mean.replicas[0] != self._place.replica
        ):
            return
        named = engine.named(mean.mean)
        content = save({name: tensor.contiguous().cpu() for name, tensor in named.items()})
        control.put_weights(self.worker.updates, self._place.stage, content)


def _engine(
    config: Config, place: Place, data: Dataset, device: torch.device
) -> Engine | EmulatedEngine:
    stage, stages, model = place.stage, config.mesh.stages, config.model
    if config.compute.emulated:
        size = coordinates(model, data.vocab, stages)[stage]
        costs = stage_costs(model, data.vocab, stages)
        return EmulatedEngine(config, stage, place.replica, size, costs)
    module = build_stage(model, data.vocab, stages, stage, config.seed)
    module.to(device, torch.float64 if config.train.dtype == "float64" else torch.float32)
    loss = cross_entropy if stage == stages - 1 else None
    program = StageProgram(module, config, device, loss)
    delay = PipelinePlan.of(config, stage).mean_delay
    return Engine(program, config, stage, place.replica, delay)


def _device(config: Config, place: Place) -> torch.device:
    device = choose_device(config)
    if device.type == "cuda":
        # Workers that share a host share its GPUs in turn.
        number = place.replica * config.mesh.stages + place.stage
        device = torch.device("cuda", number % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def _threads(config: Config) -> int:
    """`train.threads`, or this host's cores shared out among its workers."""
    if config.train.threads is not None:
        return config.train.threads
    workers = int(os.environ.get(HOST_WORKERS, os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, cores_here() // workers)


def cores_here() -> int:
    """Cores that this process may use: a scheduler may have given it some of the host's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# -- the process ---------------------------------------------------------------------------------
def _log_to(path: Path) -> None:
    """Everything that this process prints, in whatever language, goes into its log file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", buffering=1)
    except OSError as error:
        raise MeshError(f"{path}: {error.strerror}; give another --log-dir") from None
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s",
    )
    for chatty in ("httpx", "httpcore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def told(error: Exception) -> str:
    """One line; anything but an error of ours is a defect and says what it is."""
    if isinstance(error, AsyncMeshError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def leave_word(name: str, message: str) -> None:
    """For the launcher, which tells the person who typed."""
    folder = os.environ.get(ERRORS)
    if folder:
        Path(folder, f"{name}.txt").write_text(" ".join(message.split()) + "\n")

"""A worker's side of the control plane.

Owns the reporting thread: what happened since the last report goes to the coordinator, and orders
come back. Invariants: recording an event costs the main thread an append; events arrive in order
and none is lost while the coordinator lives; if it is gone, training goes on and reports wait.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import httpx
from pydantic import ValidationError

from asyncmesh.errors import MeshError
from asyncmesh.observe.events import Event, to_json
from asyncmesh.runtime.messages import (
    DistancePart,
    Hello,
    Lost,
    Message,
    Orders,
    Phase,
    Refusal,
    Report,
    State,
    ValidationPart,
    Welcome,
)

_log = logging.getLogger(__name__)
_PERIOD_S = 0.5  # between two reports while training
_GATHERING_S = 0.1  # while the others are waited for
_TIMEOUT_S = 20.0
_GIVE_UP_S = 600.0  # training goes on without a coordinator for so long
_KEPT_EVENTS = 1_000_000  # while the coordinator is silent


class Control:
    """HTTP to the coordinator."""

    def __init__(self, coordinator: str) -> None:
        self._name = coordinator
        self._http = httpx.Client(
            base_url=f"http://{coordinator}", timeout=_TIMEOUT_S, trust_env=False
        )

    def hello(self, hello: Hello) -> Welcome:
        """Take a place; raises `MeshError` with the coordinator's reason."""
        return Welcome.model_validate_json(self._post("/hello", hello))

    def report(self, report: Report) -> Orders:
        return Orders.model_validate_json(self._post("/report", report))

    def lost(self, lost: Lost) -> None:
        self._post("/lost", lost)

    def put_weights(self, update: int, stage: int, content: bytes) -> None:
        answer = self._http.put(f"/weights/{update}/{stage}", content=content, timeout=3600)
        if answer.is_error:
            raise MeshError(_reason(answer))

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, message: Message) -> bytes:
        packed = zlib.compress(message.model_dump_json().encode(), 1)
        try:
            answer = self._http.post(path, content=packed)
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"coordinator {self._name}: cannot be reached ({error}); check that it runs, its"
                " address and port, and what is between"
            ) from None
        if answer.is_error:
            raise MeshError(_reason(answer))
        return answer.content


class UnreachableError(MeshError):
    """Nobody answers at the coordinator's address."""


def _reason(answer: httpx.Response) -> str:
    try:
        return Refusal.model_validate_json(answer.content).reason
    except ValidationError:
        return f"the coordinator answered {answer.status_code}: is it one of asyncmesh?"


@runtime_checkable
class Deferred(Protocol):
    """An event whose figures a GPU has yet to compute."""

    def is_known(self) -> bool: ...
    def value(self) -> Event: ...


class Reporter:
    """The thread that reports, and the mesh's clock as the coordinator keeps it."""

    def __init__(self, control: Control, job: str, stage: int, replica: int) -> None:
        self._control, self._job, self._stage, self._replica = control, job, stage, replica
        self._events: list[Event | Deferred] = []
        self._reported = 0
        self._validations: list[ValidationPart] = []
        self._distances: list[DistancePart] = []
        self._state: State = "starting"
        self._error: str | None = None
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self.replicas_alive = 0  # as the coordinator knows it
        self._offset_s = 0.0
        self._best_trip_s = float("inf")
        self._on_phase: Callable[[Phase], None] = lambda phase: None
        self._phase: Phase | None = None
        self._heard_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="reporting", daemon=True)

    def start(self, on_phase: Callable[[Phase], None]) -> None:
        """`on_phase` is called, in the reporting thread, when the run enters another phase."""
        self._on_phase = on_phase
        self._thread.start()

    def clock(self) -> float:
        """Seconds since the run began, nearly the same on all hosts."""
        return time.monotonic() + self._offset_s

    def emit(self, event: Event | Deferred) -> None:
        """Record something that happened, or will be known later. Cheap."""
        self._events.append(event)

    def tell(self, part: ValidationPart | DistancePart) -> None:
        with self._lock:
            if isinstance(part, ValidationPart):
                self._validations.append(part)
            else:
                self._distances.append(part)

    def state(self, state: State, error: str | None = None) -> None:
        """Tell at once."""
        with self._lock:
            self._state, self._error = state, error
        self._wake.set()

    def close(self, state: State, error: str | None = None) -> None:
        """The last report; raises `MeshError` if it cannot be delivered."""
        self._closing = True
        self.state(state, error)
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)
        self._send()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._send()
            except UnreachableError as error:
                unheard_s = time.monotonic() - self._heard_s
                _log.warning("%s; unheard for %.0f s", error, unheard_s)
                if unheard_s > _GIVE_UP_S:
                    self._enter("over")
                    return
            except MeshError as error:
                _log.error("the coordinator wants nothing more of this worker: %s", error)
                self._enter("over")
                return
            waiting = self._phase in (None, "gathering")
            self._wake.wait(_GATHERING_S if waiting else _PERIOD_S)
            self._wake.clear()

    def _send(self) -> None:
        with self._sending:
            report, counts = self._next_report()
            asked_s = time.monotonic()
            orders = self._control.report(report)
            answered_s = time.monotonic()
            del self._events[: counts[0]]
            self._reported += counts[0]
            with self._lock:
                del self._validations[: counts[1]]
                del self._distances[: counts[2]]
        self._heard_s = answered_s
        self._set_clock(orders, asked_s, answered_s)
        self.replicas_alive = orders.replicas_alive
        self._enter(orders.phase)

    def _next_report(self) -> tuple[Report, tuple[int, int, int]]:
        events = self._known_events()
        with self._lock:
            validations, distances = self._validations[:], self._distances[:]
            state, error = self._state, self._error
        report = Report(
            job=self._job,
            replica=self._replica,
            stage=self._stage,
            state=state,
            error=error,
            first_event=self._reported,
            events=[to_json(event) for event in events],
            validations=validations,
            distances=distances,
        )
        return report, (len(events), len(validations), len(distances))

    def _known_events(self) -> list[Event]:
        """All up to the first that is not known yet. At the end everything is waited for."""
        if len(self._events) > _KEPT_EVENTS:
            raise MeshError("the coordinator has been silent for too long to keep a record")
        known = []
        for event in self._events[:]:
            if isinstance(event, Deferred):
                if not (self._closing or event.is_known()):
                    break
                known.append(event.value())
            else:
                known.append(event)
        return known

    def _set_clock(self, orders: Orders, asked_s: float, answered_s: float) -> None:
        """The coordinator read its clock about half-way; the shortest trip knows best."""
        trip_s = answered_s - asked_s
        if orders.started_s is not None and trip_s < self._best_trip_s:
            self._best_trip_s = trip_s
            self._offset_s = orders.now_s - (asked_s + answered_s) / 2 - orders.started_s

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase:
            self._phase = phase
            self._on_phase(phase)

"""The coordinator: the one address that everybody knows.

Owns the mesh's servers (control plane, store, a lighthouse for each stage) and the run's record. It
decides who has which place and when the run begins and ends; it is never on the way of an update,
an activation or a mean. Invariant: it listens on the address it was given and on no other.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torchft.coordination import LighthouseServer

from asyncmesh.config import Config
from asyncmesh.configuration import flattened
from asyncmesh.errors import AsyncMeshError, MeshError, WireError
from asyncmesh.runtime.collector import Collector
from asyncmesh.runtime.messages import Hello, Lost, Message, Orders, Refusal, Report, Taken, Welcome
from asyncmesh.runtime.network import listen, serve_store
from asyncmesh.runtime.roster import Roster, versions_here

_MOST_BYTES = 64 * 2**20  # of a report, unpacked
_FAREWELL_S = 2.0
_HEARTBEAT_MS = 5_000  # without one for so long, a replica is taken for dead
_PATIENCE_MS = 7 * 24 * 3600 * 1000  # a live one is waited for, however slow it is


class Coordinator:
    """All servers of a mesh, in threads of their own. It listens from its making on."""

    def __init__(self, config: Config, data: str, address: str, port: int = 0) -> None:
        self._config, self._data = config, data
        self.roster = Roster(config, versions_here())
        self.changed = threading.Condition()  # notified when something was reported
        self.failure: Exception | None = None
        self._socket = listen(address, port, "the coordinator")
        self.address = f"{address}:{self._socket.getsockname()[1]}"
        self._store, store_port = serve_store(address)
        self._store_address = f"{address}:{store_port}"
        self._rounds = [_Lighthouse(address) for _ in range(config.mesh.stages)]
        self._evaluations = [_Lighthouse(address) for _ in range(config.mesh.stages)]
        self._server = uvicorn.Server(
            uvicorn.Config(
                Starlette(
                    routes=[
                        Route("/hello", self._on(Hello, self._welcome), methods=["POST"]),
                        Route("/report", self._on(Report, self._orders), methods=["POST"]),
                        Route("/lost", self._on(Lost, self._note_lost), methods=["POST"]),
                        Route("/weights/{update:int}/{stage:int}", self._put, methods=["PUT"]),
                    ]
                ),
                log_config=None,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    def start(self, collector: Collector, weights: Path) -> None:
        """Answer; reports go to `collector`, final weights into files under `weights`."""
        self._collector, self._weights = collector, weights
        self._thread.start()

    def close(self) -> None:
        """Let those who are still there hear that it is over, then go."""
        deadline_s = time.monotonic() + _FAREWELL_S
        with self.changed:
            self.roster.phase = "over"
            while not self.roster.all_know_it_is_over() and time.monotonic() < deadline_s:
                self.changed.wait(0.1)
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._socket.close()
        for lighthouse in (*self._rounds, *self._evaluations):
            lighthouse.close()

    def wait(self, timeout_s: float) -> None:
        """Until something was reported, or so long."""
        with self.changed:
            self.changed.wait(timeout_s)

    def stop(self) -> None:
        """Save and stop: workers learn it with the answer to their next report."""
        with self.changed:
            self.roster.stop()
            self.changed.notify_all()

    def lost(self, lost: Lost) -> None:
        """Workers are known to be gone: their launcher saw them end."""
        with self.changed:
            self.roster.lost(lost)
            self.changed.notify_all()

    def forget_the_silent(self) -> None:
        """Who has not been heard for long is taken for lost."""
        with self.changed:
            self.roster.forget_the_silent(time.monotonic())

    # -- the control plane ------------------------------------------------------------------------
    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def _on(self, kind: type[Message], answer: Callable[[Any], Message]) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                said = kind.model_validate_json(await _body(request))
                with self.changed:
                    reply = answer(said)
                    self.changed.notify_all()
            except ValidationError as error:
                return _refused(f"not understood: {error.errors()[0]['msg']}", 400)
            except AsyncMeshError as error:
                return _refused(str(error), 409)
            return JSONResponse(reply.model_dump(mode="json"))

        return endpoint

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.roster.stop()
            self.changed.notify_all()

    def _welcome(self, hello: Hello) -> Welcome:
        roster = self.roster
        running = roster.phase == "running"
        roster.claim(hello, time.monotonic())
        return Welcome(
            settings=flattened(self._config.model_dump(exclude_unset=True)),
            store=self._store_address,
            rounds=[lighthouse.address for lighthouse in self._rounds],
            evaluations=[lighthouse.address for lighthouse in self._evaluations],
            attempt=roster.attempts.get(hello.replica, 0),
            running=running,
            data=self._data,
        )

    def _note_lost(self, lost: Lost) -> Taken:
        self.roster.lost(lost)
        return Taken()

    def _orders(self, report: Report) -> Orders:
        now_s = time.monotonic()
        try:
            self._collector.take(self.roster.news(report))
        except OSError as error:  # the run's folder: a disk that is full, for one
            self._fail(error)
        self.roster.heard(report, now_s)
        phase = self.roster.phase_for(report)
        return Orders(
            phase=phase,
            replicas_alive=self.roster.replicas_alive(),
            now_s=now_s,
            started_s=self.roster.started_s,
        )

    async def _put(self, request: Request) -> Response:
        """A stage's final weights (safetensors), into a file."""
        update, stage = request.path_params["update"], request.path_params["stage"]
        folder = self._weights / f".step-{update}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"stage-{stage}.safetensors").open("wb") as file:
                async for chunk in request.stream():
                    file.write(chunk)
        except OSError as error:
            self._fail(error)
            return _refused(f"the coordinator cannot save weights: {error}", 500)
        return JSONResponse({})


class _Lighthouse:
    """torchft's, with the address that it is really bound to."""

    def __init__(self, address: str) -> None:
        try:
            self._server = LighthouseServer(
                bind=f"{address}:0",
                min_replicas=1,
                join_timeout_ms=_PATIENCE_MS,
                heartbeat_timeout_ms=_HEARTBEAT_MS,
            )
        except Exception as error:
            raise MeshError(f"a lighthouse cannot listen on {address}: {error}") from None
        port = self._server.address().rpartition(":")[2]
        self.address = f"http://{address}:{port}"

    def close(self) -> None:
        self._server.shutdown()


async def _body(request: Request) -> bytes:
    """The unpacked body, no larger than anything we would send."""
    unpack = zlib.decompressobj()
    content = b""
    async for chunk in request.stream():
        try:
            content += unpack.decompress(chunk, _MOST_BYTES - len(content) + 1)
        except zlib.error as error:
            raise WireError(f"a message cannot be unpacked: {error}") from None
        if len(content) > _MOST_BYTES:
            raise WireError(f"a message of more than {_MOST_BYTES} bytes")
    return content


def _refused(reason: str, status: int) -> Response:
    return JSONResponse(Refusal(reason=reason).model_dump(), status_code=status)

"""Starting and ending the workers of this host.

Owns the processes. A replica's workers on a host are one torchrun job. Invariant: after `close`
none of them is left, however they behaved.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from asyncmesh.runtime.job import BACKEND, LAUNCHER
from asyncmesh.runtime.messages import Lost
from asyncmesh.runtime.process import ERRORS, HOST_WORKERS

_TERMINATE_S = 5.0


@dataclass
class ReplicaJob:
    """torchrun for stages `first` to `last` of a replica."""

    coordinator: str
    replica: int
    first: int
    last: int
    log_folder: Path
    settings: list[str] = field(default_factory=list)  # --section.key=value, this host's own
    address: str | None = None
    host_workers: int | None = None
    job: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self._errors = tempfile.TemporaryDirectory(prefix="asyncmesh-errors-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        count = self.last - self.first + 1
        self.log_folder.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "asyncmesh.runtime.job"),
            *(f"--rdzv-backend={BACKEND}", f"--rdzv-id={self.job}", "--nnodes=1"),
            *(f"--nproc-per-node={count}", "--max-restarts=0", "-m", "asyncmesh.worker"),
            f"--coordinator={self.coordinator}",
            f"--replica={self.replica}",
            f"--stages={self.first}-{self.last}",
            f"--log-dir={self.log_folder}",
            *([f"--bind={self.address}"] if self.address else []),
            *self.settings,
        ]
        environment = {
            **os.environ,
            ERRORS: self._errors.name,
            LAUNCHER: str(os.getpid()),
            HOST_WORKERS: str(self.host_workers or count),
            "RUST_LOG": "warn",  # torchft's
            # PyTorch's store looks up the name of every address it connects to, and waits for it.
            "RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1 attempts:1"),
            "TORCH_CPP_LOG_LEVEL": "WARNING",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with (self.log_folder / f"replica-{self.replica}-torchrun.log").open("ab") as log:
            # A session of its own: Ctrl-C is its launcher's business.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process is not None else None

    def wait(self) -> int:
        """Until it has ended; answers the exit code."""
        assert self._process is not None  # started
        return self._process.wait()

    def reason(self) -> str:
        """Why it ended as it did, in one line: the first thing that went wrong."""
        words = sorted(Path(self._errors.name).glob("*.txt"), key=lambda p: p.stat().st_mtime)
        if words:
            return words[0].read_text().strip()
        return f"its process ended with exit code {self.exit_code()}"

    def lost(self) -> Lost:
        """What the coordinator is told when it has ended."""
        return Lost(
            job=self.job,
            replica=self.replica,
            first=self.first,
            last=self.last,
            reason=self.reason(),
        )

    def close(self) -> None:
        """End what still runs: politely, then not."""
        process = self._process
        if process is not None:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_TERMINATE_S)
            # torchrun's workers are of its session's process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._errors.cleanup()

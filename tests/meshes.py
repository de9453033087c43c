"""Starting real meshes for tests: tiny settings, commands, hosts that are network namespaces."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

TINY = [
    "--train.updates=8",
    "--train.eval_every=4",
    "--train.eval_sequences=6",
    "--train.device=cpu",
    "--train.threads=1",
    "--pipeline.microbatch_size=2",
    "--model.layers=2",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
]
TIMEOUT_S = 120.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "asyncmesh", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "COLUMNS": "120"}


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@contextmanager
def started(
    arguments: list[str], folder: Path, host: Host | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, ended when the test ends or takes too long."""
    prefix = [] if host is None else ["ip", "netns", "exec", host.namespace]
    with subprocess.Popen(
        [*prefix, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            if process.poll() is None:
                process.kill()


def wait_for_line(process: subprocess.Popen[str], words: str) -> str:
    """Everything it printed up to and with the first line that has these words in it."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"ended without saying {words!r}: {said}")


def processes_of(folder: Path) -> dict[int, list[str]]:
    """All processes that work for runs in that folder: their arguments by process id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if any(str(folder) in argument for argument in arguments):
            found[int(entry.name)] = arguments
    return found


def assert_nothing_is_left(folder: Path, within_s: float = 5.0) -> None:
    """No process of a run in that folder, after so many seconds at the most."""
    deadline_s = time.monotonic() + within_s
    for process in processes_of(folder):
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(process)
            select.select([ended], [], [], max(0.0, deadline_s - time.monotonic()))
            os.close(ended)
    assert processes_of(folder) == {}


@dataclass(frozen=True)
class Host:
    """A network namespace with one address."""

    namespace: str
    address: str


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts on one switch, each in a network namespace. Skips the test where that cannot be."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs the command `ip` and root, to make network namespaces")
    tag = f"am{os.getpid()}"
    switch = f"{tag}s"
    made = []
    try:
        if subprocess.run(
            ["ip", "netns", "add", switch], capture_output=True, check=False
        ).returncode:
            pytest.skip("network namespaces cannot be made here")
        made.append(switch)
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        result = []
        for number in range(count):
            host = Host(f"{tag}h{number}", f"10.213.7.{number + 1}")
            _ip("netns", "add", host.namespace)
            made.append(host.namespace)
            port = f"port{number}"
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0")
            _ip("-n", switch, "link", "set", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            result.append(host)
        yield result
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

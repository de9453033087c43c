"""What a run shows while it goes on: a progress bar on a terminal, plain lines elsewhere.

Owns the live view. Invariant: plain output has no control characters, so it can be logged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:  # loads torch, and --help is to be quick
    from asyncmesh.config import Config
    from asyncmesh.data.sampler import Dataset
    from asyncmesh.simulator.evaluation import Progress as ProgressFunction

console = Console()
_LINES = 10  # plain lines in a run


def print_job(config: Config, parameters: int, data: Dataset) -> None:
    """What is about to run, in one line."""
    print(
        f"{config.model.layers} layers, {parameters:,} parameters, {data.train_tokens:,}"
        f" training tokens ({data.kind}); {config.mesh.stages} stages ×"
        f" {config.mesh.replicas} replicas, {config.averaging.method}, {config.optimizer.name}",
        flush=True,
    )


@contextmanager
def progress(title: str, updates: int) -> Iterator[ProgressFunction]:
    """A function (update, loss) to call as the run goes on."""
    if console.is_terminal:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("updates  loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(title, total=updates, loss="-")
            yield lambda update, loss: bar.update(task, completed=update, loss=f"{loss:.3f}")
        return
    yield _plain(title, updates)


def _plain(title: str, updates: int) -> ProgressFunction:
    began_s, said = time.monotonic(), 0

    def show(update: int, loss: float) -> None:
        nonlocal said
        step = update * _LINES // updates
        if step > said:
            said = step
            elapsed_s = time.monotonic() - began_s
            print(f"{title}: update {update}/{updates}  loss {loss:.3f}  {elapsed_s:.0f} s")

    return show

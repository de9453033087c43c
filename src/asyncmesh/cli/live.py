"""The live view of a real run: one table of all workers on a terminal, plain lines elsewhere.

Owns what is shown while a mesh gathers and trains. Invariant: plain output has no control
characters, so it can be logged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live as RichLive
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from asyncmesh.cli.console import console
from asyncmesh.config import Config
from asyncmesh.observe.live import Live
from asyncmesh.runtime.roster import Roster, explain_missing

_LINES = 10  # plain lines in a run
_MOST_ROWS = 24


@contextmanager
def live_view(config: Config, live: Live, roster: Roster) -> Iterator[View]:
    """Something to call `show()` on now and then."""
    if not console.is_terminal:
        yield PlainView(config, live, roster)
        return
    view = TableView(config, live, roster)
    with RichLive(view.render(), console=console, refresh_per_second=4, transient=True) as display:
        view.display = display
        yield view


class View:
    """What a run looks like just now."""

    def __init__(self, config: Config, live: Live, roster: Roster) -> None:
        self.config, self.live, self.roster = config, live, roster
        self._lost: set[tuple[int, int]] = set()

    def show(self) -> None:
        raise NotImplementedError

    def _say_who_went_and_came(self) -> None:
        for (stage, replica), place in sorted(self.roster.places.items()):
            name = f"stage {stage} of replica {replica} on {place.host}"
            if (stage, replica) in self._lost and place.state == "training":
                self._lost.remove((stage, replica))
                console.print(f"back: {name}", markup=False, soft_wrap=True)
            elif (stage, replica) not in self._lost and place.state == "failed":
                self._lost.add((stage, replica))
                console.print(f"lost: {name}: {place.error}", markup=False, soft_wrap=True)


class PlainView(View):
    """A line now and then."""

    def __init__(self, config: Config, live: Live, roster: Roster) -> None:
        super().__init__(config, live, roster)
        self._began_s, self._said = time.monotonic(), 0
        self._awaited: str | None = ""  # None: nobody is any more

    def show(self) -> None:
        self._say_who_went_and_came()
        if self.roster.phase == "gathering":
            self._say_who_is_missing()
        elif self._awaited is not None and self.live.workers:
            self._awaited = None
            print("training begins", flush=True)
        updates, live = self.config.train.updates, self.live
        step = live.update * _LINES // updates
        if step > self._said:
            self._said = step
            loss = f"  loss {live.loss:.3f}" if live.loss is not None else ""
            print(
                f"training: update {live.update}/{updates}{loss}  {live.tokens_per_s:,.0f} tokens/s"
                f"  {time.monotonic() - self._began_s:.0f} s",
                flush=True,
            )

    def _say_who_is_missing(self) -> None:
        missing = explain_missing(self.roster.missing())
        if missing and missing != self._awaited:
            self._awaited = missing
            print(f"waiting for {missing}", flush=True)


class TableView(View):
    """A row a worker, a progress bar over them."""

    def __init__(self, config: Config, live: Live, roster: Roster) -> None:
        super().__init__(config, live, roster)
        self.display: RichLive | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("updates"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("gathering", total=config.train.updates)

    def show(self) -> None:
        self._say_who_went_and_came()
        if self.display is not None:
            self.display.update(self.render())

    def render(self) -> Group:
        phase = {"running": "training"}.get(self.roster.phase, self.roster.phase)
        self._bar.update(self._task, completed=self.live.update, description=phase)
        if self.roster.phase == "gathering":
            missing = explain_missing(self.roster.missing())
            what = f"waiting for {missing}" if missing else "all are here and get ready"
            return Group(self._bar, Text(what))
        return Group(self._bar, Text(self._headline()), self._workers())

    def _headline(self) -> str:
        live, mesh = self.live, self.config.mesh
        said = [f"{live.tokens_per_s:,.0f} tokens/s"]
        if live.loss is not None:
            said.insert(0, f"training loss {live.loss:.3f}")
        if live.validation is not None and live.validation.loss is not None:
            said.append(
                f"validation loss {live.validation.loss:.3f} after update {live.validation.update}"
            )
        said.append(f"replicas alive {self.roster.replicas_alive()}/{mesh.replicas}")
        return "  ·  ".join(said)

    def _workers(self) -> Table:
        titles = ("replica", "stage", "update", "busy", "delay", "rounds", "pipeline", "data")
        table = Table(*titles, box=None, padding=(0, 2))
        rows = sorted(self.live.workers.items(), key=lambda item: (item[0][1], item[0][0]))
        for (stage, replica), worker in rows[:_MOST_ROWS]:
            rounds = f"{worker.rounds}"
            if worker.rounds:
                rounds += f" (delay {worker.round_delay:.1f})"
            table.add_row(
                str(replica),
                str(stage),
                str(worker.update),
                f"{worker.busy:.0%}",
                f"{worker.delay:.1f}",
                rounds,
                f"{worker.pipeline_bytes / 1e6:,.1f} MB",
                f"{worker.data_bytes / 1e6:,.1f} MB",
            )
        if len(rows) > _MOST_ROWS:
            table.caption = f"and {len(rows) - _MOST_ROWS} more workers"
        return table

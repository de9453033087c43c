"""What a real run looks like while it goes on: the last figures of every worker.

Owns the figures of the live view, computed from events as they arrive. Rates are over a short
window, so that a slow link or a slow machine shows within seconds. Invariant: what it keeps does
not grow with the run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from asyncmesh.config import Config
from asyncmesh.observe.events import (
    Backward,
    Evaluation,
    Event,
    Forward,
    Loss,
    Merge,
    Message,
    Skip,
    Update,
)

_WINDOW_S = 10.0


@dataclass
class LiveWorker:
    """One worker's latest figures."""

    update: int = 0
    delay: float = 0.0  # of the last backwards, smoothed
    rounds: int = 0
    round_delay: float = 0.0
    skipped: int = 0
    pipeline_bytes: int = 0
    data_bytes: int = 0
    spans: deque[tuple[float, float]] = field(default_factory=deque)  # (end, busy seconds)
    backwards: deque[float] = field(default_factory=deque)  # when they ended
    now_s: float = 0.0

    def span(self, begin_s: float, end_s: float) -> None:
        self.now_s = max(self.now_s, end_s)
        self.spans.append((end_s, end_s - begin_s))
        while self.spans[0][0] < self.now_s - _WINDOW_S:
            self.spans.popleft()
        while self.backwards and self.backwards[0] < self.now_s - _WINDOW_S:
            self.backwards.popleft()

    @property
    def _window_s(self) -> float:
        return min(_WINDOW_S, self.now_s)

    @property
    def busy(self) -> float:
        """Share of the window's time in which it computed."""
        return sum(busy for _, busy in self.spans) / self._window_s if self._window_s else 0.0

    @property
    def microbatches_per_s(self) -> float:
        return len(self.backwards) / self._window_s if self._window_s else 0.0


class Live:
    """A sink."""

    def __init__(self, config: Config) -> None:
        self._accumulation = config.pipeline.accumulation
        self._tokens = config.pipeline.microbatch_size * config.model.context
        self.workers: dict[tuple[int, int], LiveWorker] = {}
        self.losses: dict[int, float] = {}  # by replica, smoothed
        self.loss_update = 0
        self.validation: Evaluation | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Evaluation):
            self.validation = event
            return
        worker = self.workers.setdefault((event.stage, event.replica), LiveWorker())
        if isinstance(event, Forward):
            worker.span(event.start_s, event.end_s)
        elif isinstance(event, Backward):
            worker.backwards.append(event.end_s)
            worker.span(event.start_s, event.end_s)
            worker.delay += (event.delay - worker.delay) / 8
        elif isinstance(event, Update):
            worker.span(event.start_s, event.end_s)
            worker.update = event.update
        elif isinstance(event, Merge):
            worker.rounds += 1
            worker.round_delay += (event.delay - worker.round_delay) / 8
        elif isinstance(event, Skip):
            worker.skipped += 1
        elif isinstance(event, Message):
            if event.axis == "data":
                worker.data_bytes += event.bytes
            else:
                worker.pipeline_bytes += event.bytes
        elif isinstance(event, Loss):
            before = self.losses.get(event.replica, event.loss)
            self.losses[event.replica] = before + (event.loss - before) / 8
            self.loss_update = max(self.loss_update, event.microbatch // self._accumulation + 1)

    @property
    def update(self) -> int:
        """The update that the first stages have made: the slowest replica's that is still heard."""
        firsts = [worker for (stage, _), worker in self.workers.items() if stage == 0]
        now_s = max((worker.now_s for worker in firsts), default=0.0)
        return min((w.update for w in firsts if w.now_s >= now_s - _WINDOW_S), default=0)

    @property
    def loss(self) -> float | None:
        return sum(self.losses.values()) / len(self.losses) if self.losses else None

    @property
    def tokens_per_s(self) -> float:
        firsts = (w for (stage, _), w in self.workers.items() if stage == 0)
        return sum(w.microbatches_per_s for w in firsts) * self._tokens

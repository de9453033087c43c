"""When a computation began and ended, on the device that did it.

Owns how busy time is measured. On the CPU it is the clock before and after. On a GPU the main
thread only queues work, so the marks are events in the computing stream, read later by whoever
reports: measuring never makes the main thread wait. Invariant: spans of one worker do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from asyncmesh.observe.events import Event

Clock = Callable[[], float]


@dataclass
class Span:
    """A computation's begin and end in mesh time."""

    begin_s: float
    end_s: float = 0.0


class Stopwatch:
    """Of a worker that computes on the CPU."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def begin(self) -> Span:
        return Span(self.clock())

    def end(self, span: Span, make: Callable[[float, float], Event]) -> Event | CudaEvent:
        """The event of a computation that has just ended; `make` is given begin and end."""
        span.end_s = self.clock()
        return make(span.begin_s, span.end_s)


class CudaStopwatch(Stopwatch):
    """Of a worker on a GPU: marks in the computing stream, related to the clock once."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        super().__init__(clock)
        self._device = device
        self._base: torch.cuda.Event | None = None
        self._base_s = 0.0

    def begin(self) -> Span:
        if self._base is None:
            torch.cuda.synchronize(self._device)
            self._base, self._base_s = self._mark(), self.clock()
        return CudaSpan(0.0, first=self._mark())

    def end(self, span: Span, make: Callable[[float, float], Event]) -> Event | CudaEvent:
        assert isinstance(span, CudaSpan)
        assert self._base is not None
        return CudaEvent(self._base, self._base_s, span.first, self._mark(), make)

    def _mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass
class CudaSpan(Span):
    first: torch.cuda.Event = field(kw_only=True)


@dataclass
class CudaEvent:
    """An event whose times the GPU has yet to tell."""

    base: torch.cuda.Event
    base_s: float
    first: torch.cuda.Event
    last: torch.cuda.Event
    make: Callable[[float, float], Event]

    def is_known(self) -> bool:
        return bool(self.last.query())  # type: ignore[no-untyped-call]

    def value(self) -> Event:
        self.last.synchronize()
        begin_s = self.base_s + self.base.elapsed_time(self.first) / 1e3
        end_s = self.base_s + self.base.elapsed_time(self.last) / 1e3
        return self.make(begin_s, end_s)


def stopwatch_for(device: torch.device, clock: Clock) -> Stopwatch:
    return CudaStopwatch(clock, device) if device.type == "cuda" else Stopwatch(clock)

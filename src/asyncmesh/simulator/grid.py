"""A schedule as text: workers down, time across.

Owns the drawing. The schedule itself is not computed here: the hollow mesh runs the real protocol
with computations of whole slots and links without delay, and what it did is drawn.
"""

from __future__ import annotations

from asyncmesh.config import Config
from asyncmesh.observe.events import Backward, Event, Forward, Update
from asyncmesh.simulator.mesh import Sizes, VirtualMesh


def schedule_grid(config: Config) -> str:
    """F7: forward of microbatch 7; B7: its backward; *: an update follows; ·: idle."""
    events: list[Event] = []
    stages = config.mesh.stages
    VirtualMesh(config, events.append, sizes=Sizes([0] * (stages - 1), [0] * stages)).run()
    slots: dict[tuple[int, int], str] = {}
    delays: dict[int, int] = {}
    for event in events:
        if isinstance(event, Forward | Backward):
            letter = "F" if isinstance(event, Forward) else "B"
            first, last = round(event.start_s), round(event.end_s)
            slots[event.stage, first] = f"{letter}{event.microbatch}"
            for slot in range(first + 1, last):
                slots[event.stage, slot] = "=" * len(slots[event.stage, first])
        if isinstance(event, Backward):
            delays[event.stage] = max(delays.get(event.stage, 0), event.delay)
        elif isinstance(event, Update):
            slots[event.stage, round(event.start_s) - 1] += "*"
    width = max(map(len, slots.values())) + 1
    end = max(slot for _, slot in slots) + 1
    lines = [f"stage | {'time →'.ljust(end * width)}| largest delay"]
    for stage in range(stages):
        cells = "".join(slots.get((stage, slot), "·").ljust(width) for slot in range(end))
        lines.append(f"{stage:>5} | {cells}| {delays[stage]}")
    busy = sum(text != "·" for text in slots.values()) / (end * stages)
    lines.append(f"F forward, B backward, * an update follows, · idle; {busy:.0%} of slots busy")
    return "\n".join(lines)

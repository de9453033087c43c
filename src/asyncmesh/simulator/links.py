"""What a message costs in virtual time.

Owns the model of the network. A link is one direction of one edge: messages leave one after another
at its bandwidth, travel for its latency and an exponential jitter, and arrive in the order they
were sent, as on one TCP connection. Invariant: arrivals never decrease; with the same seed they are
the same.
"""

from __future__ import annotations

import random

from asyncmesh.config import Config

_MEGABIT = 1e6 / 8


def _per_edge(value: float | list[float] | None, edges: int) -> list[float | None]:
    return list(value) if isinstance(value, list) else [value] * edges


class Link:
    """One direction of a pipeline edge."""

    __slots__ = ("_arrival_s", "_bytes_per_s", "_free_s", "_jitter_s", "_latency_s", "_random")

    def __init__(
        self, bandwidth_mbps: float | None, latency_ms: float, jitter_ms: float, seed: str
    ) -> None:
        self._bytes_per_s = None if bandwidth_mbps is None else bandwidth_mbps * _MEGABIT
        self._latency_s = latency_ms / 1e3
        self._jitter_s = jitter_ms / 1e3
        self._random = random.Random(seed)
        self._free_s = self._arrival_s = 0.0

    def send(self, now_s: float, size: int) -> float:
        """When a message handed over now arrives."""
        self._free_s = max(self._free_s, now_s)
        if self._bytes_per_s is not None:
            self._free_s += size / self._bytes_per_s
        arrival = self._free_s + self._latency_s
        if self._jitter_s:
            arrival += self._random.expovariate(1 / self._jitter_s)
        self._arrival_s = max(self._arrival_s, arrival)
        return self._arrival_s


def pipeline_links(config: Config, replica: int, direction: str) -> list[Link]:
    """One link for each edge of a replica, in one direction."""
    edges, links = config.mesh.stages - 1, config.links
    bandwidths = _per_edge(links.bandwidth_mbps, edges)
    latencies = _per_edge(links.latency_ms, edges)
    jitters = _per_edge(links.jitter_ms, edges)
    slow = links.replica_slowdown[replica] if links.replica_slowdown else 1.0
    return [
        Link(
            _slower(bandwidths[edge], slow),
            (latencies[edge] or 0.0) * slow,
            (jitters[edge] or 0.0) * slow,
            f"{config.seed}/{replica}/{edge}/{direction}",
        )
        for edge in range(edges)
    ]


def _slower(bandwidth_mbps: float | None, factor: float) -> float | None:
    return None if bandwidth_mbps is None else bandwidth_mbps / factor


class RingLink:
    """A stage's replicas as a ring: one all-reduce after another.

    M replicas each send 2(M-1)/M of the payload in 2(M-1) steps, so an all-reduce that the last
    replica joins at t is done at max(t, previous) + 2(M-1)/M · bytes / bandwidth + 2(M-1) ·
    latency. The slowest replica's links set the pace of all.
    """

    def __init__(self, config: Config) -> None:
        links, edges = config.links, max(1, config.mesh.stages - 1)
        bandwidth = links.averaging_bandwidth_mbps
        if bandwidth is None:
            given = [b for b in _per_edge(links.bandwidth_mbps, edges) if b is not None]
            bandwidth = min(given, default=None)
        latency = links.averaging_latency_ms
        if latency is None:
            latencies = _per_edge(links.latency_ms, edges)
            latency = max((given or 0.0 for given in latencies), default=0.0)
        slow = max(links.replica_slowdown, default=1.0)
        bandwidth = _slower(bandwidth, slow)
        self._bytes_per_s = None if bandwidth is None else bandwidth * _MEGABIT
        self._latency_s = latency / 1e3 * slow
        self._free_s = 0.0

    def bytes_sent(self, payload: int, members: int) -> int:
        """What each member sends for one round."""
        return 2 * (members - 1) * payload // members

    def reduce(self, now_s: float, payload: int, members: int) -> float:
        """When the mean of a round that is complete now has arrived everywhere."""
        self._free_s = max(self._free_s, now_s)
        if self._bytes_per_s is not None:
            self._free_s += self.bytes_sent(payload, members) / self._bytes_per_s
        return self._free_s + 2 * (members - 1) * self._latency_s

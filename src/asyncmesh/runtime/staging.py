"""Tensors between a worker's device and the network, which reads and writes CPU memory.

Owns the copies. On a GPU they go through pinned memory on a stream of their own, issued and waited
for by the threads that send and receive, so the main thread and the stream it computes on never
wait for one. Invariant: a tensor that is handed out is complete, and one that is handed in is read
only after what its producer had queued when it was handed in.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncmesh.runtime.frames import Frame, frame_bytes, pack, unpack


class Staging:
    """On the CPU there is nothing to stage."""

    def ready(self) -> torch.cuda.Event | None:
        """A mark after all that the computing stream has queued; for its own thread to take."""
        return None

    def room(self, count: int) -> Tensor:
        """Memory that the network can write to."""
        return torch.empty(count, dtype=torch.uint8)

    def pack(
        self, frame: Frame, wire: torch.dtype | None, ready: torch.cuda.Event | None
    ) -> Tensor:
        """The message of a frame whose payload was complete at `ready`."""
        message = self.room(frame_bytes(frame.payload, wire))
        place = pack(frame, message, wire)
        if frame.payload is not None:
            place.copy_(frame.payload)
        return message

    def unpack(self, message: Tensor) -> Frame:
        """The frame of a message, its payload on the device and in its sender's dtype."""
        frame = unpack(message)
        if frame.payload is None:
            return frame
        return replace(frame, payload=frame.payload.to(frame.dtype))

    def to_cpu(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        return tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor


class CudaStaging(Staging):
    """Pinned memory and one side stream. Each thread that copies has a staging of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def ready(self) -> torch.cuda.Event | None:
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def room(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def pack(
        self, frame: Frame, wire: torch.dtype | None, ready: torch.cuda.Event | None
    ) -> Tensor:
        message = self.room(frame_bytes(frame.payload, wire))
        place = pack(frame, message, wire)
        if frame.payload is not None:
            self._copy_out(frame.payload, place, ready)
        return message

    def unpack(self, message: Tensor) -> Frame:
        frame = unpack(message)
        if frame.payload is None:
            return frame
        # Crosses the bus as narrow as it came, and is widened on the device.
        return replace(frame, payload=self._copy_in(frame.payload, frame.dtype))

    def to_cpu(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        place = self.room(tensor.numel() * tensor.element_size()).view(tensor.dtype)
        self._copy_out(tensor, place.view(tensor.shape), ready)
        return place.view(tensor.shape)

    def to_device(self, tensor: Tensor) -> Tensor:
        return self._copy_in(tensor, tensor.dtype)

    def _copy_out(self, tensor: Tensor, place: Tensor, ready: torch.cuda.Event | None) -> None:
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            narrow = tensor.to(place.dtype)
            place.copy_(narrow, non_blocking=True)
        # The allocator may reuse the memory only when this stream is done with it.
        tensor.record_stream(self._stream)
        self._stream.synchronize()

    def _copy_in(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        with torch.cuda.stream(self._stream):
            arrived = tensor.to(self._device, non_blocking=True).to(dtype)
        arrived.record_stream(torch.cuda.default_stream(self._device))
        self._stream.synchronize()
        return arrived


def staging_for(device: torch.device) -> Staging:
    return CudaStaging(device) if device.type == "cuda" else Staging()

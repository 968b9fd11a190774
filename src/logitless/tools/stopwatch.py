"""Time between two moments on a device, and the bandwidth of a plain copy: for ``tune`` and for the benchmarks."""

from __future__ import annotations

import itertools
import statistics
import time

import torch

CUDA_COPY_BYTES = 4 << 30
CPU_COPY_BYTES = 384 << 20


class StopWatch:
    """Time between marks: by CUDA events on a GPU, so that no mark waits, and by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list = []

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def laps_ms(self) -> list[float]:
        """Milliseconds between consecutive marks, after everything has finished. Clears the marks."""
        marks, self._marks = self._marks, []
        pairs = itertools.pairwise(marks)
        if not self._cuda:
            return [(b - a) * 1e3 for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def copy_bandwidth(device: torch.device, repeats: int = 10) -> float:
    """Bytes per second, reads and writes together, of a plain copy that is larger than any cache."""
    source = torch.zeros(CUDA_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    clock = StopWatch(device)
    laps = []
    for _ in range(repeats):
        clock.mark()
        target.copy_(source)
        clock.mark()
        laps += clock.laps_ms()
    return 2 * source.numel() / (statistics.median(laps) / 1e3)

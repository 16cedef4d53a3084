"""Time launches on a device: CUDA graphs between events on a GPU, the host's clock on a CPU.

A sample is the mean of a replay: some launches, one after the other, over slots in turn, all of which
are more than a cache of the device holds. Contenders of a case are
replayed in turn too, each round beginning with another, so that a drift of clocks hits all of them alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

Replay = Callable[[], None]
"""Run once what was made ready."""

LONGEST_US = 20_000.0
"""Most microseconds of a replay, where one launch is shorter: slow contenders are launched less often a sample."""
COPIED = 4 << 30
"""Bytes of the buffer whose copying gives a GPU's bandwidth."""


class Clock:
    """Makes launches ready and times them. ``launches`` is the number of launches a replay that the spec asks for."""

    def __init__(self, device: torch.device, launches: int) -> None:
        self.device, self.launches = device, launches
        self.cuda = device.type == "cuda"

    def settle(self) -> None:
        """Wait until the device is idle; what failed on it is raised here."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def estimate(self, launch: Callable[[int], object], slots: int) -> float:
        """Microseconds of a launch, roughly: on a GPU it is warmed up and launched three times, elsewhere once."""
        count = 3 if self.cuda else 1
        for slot in range(count - 1):
            launch(slot % slots)
        return float(self.time(lambda: [launch(slot % slots) for slot in range(count)], 1)[0]) / count

    def count(self, estimate: float, slots: int) -> int:
        """Launches of one replay, for a launch of so many microseconds: as many as were asked for, and every slot's.

        Fewer where those would take longer than :data:`LONGEST_US`. Below ``slots`` the same first slots are launched again and
        again, so that the working set does not turn over whole: whoever counts says so.
        """
        return max(1, min(max(self.launches, slots), int(LONGEST_US / max(estimate, 1e-3))))

    def ready(self, launch: Callable[[int], object], slots: int, count: int) -> Replay:
        """``count`` launches over the slots in turn, as a graph on a GPU. Raises where a launch cannot be captured."""

        def rounds() -> None:
            for number in range(count):
                launch(number % slots)

        if not self.cuda:
            return rounds
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        collecting = gc.isenabled()
        gc.disable()  # what is collected during a capture may free what the capture must not touch
        try:
            with torch.cuda.stream(stream):
                launch(0)
                self.settle()
                graph.capture_begin()
                try:
                    rounds()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream(self.device).wait_stream(stream)

        def replay(kept: Callable[[int], object] = launch) -> None:  # the graph knows addresses alone: what is behind them must live
            graph.replay()

        return replay

    def time(self, replay: Callable[[], object], repeats: int) -> np.ndarray:
        """Microseconds of each of ``repeats`` replays, float64."""
        return self.race({"": replay}, repeats)[""]

    def race(self, replays: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, np.ndarray]:
        """Microseconds of each replay, float64 ``[repeats]`` a contender; they take turns."""
        names = list(replays)
        found = {name: np.empty(repeats, np.float64) for name in names}
        marks = []
        self.settle()
        for number in range(repeats):
            for at in range(len(names)):
                name = names[(number + at) % len(names)]
                if self.cuda:
                    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    replays[name]()
                    stop.record()
                    marks.append((name, number, start, stop))
                else:
                    begun = time.perf_counter()
                    replays[name]()
                    found[name][number] = (time.perf_counter() - begun) * 1e6
        self.settle()
        for name, number, start, stop in marks:
            found[name][number] = start.elapsed_time(stop) * 1e3
        return found

    def release(self) -> None:
        """Give freed memory back to the device, so that the next case finds it in one piece."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


class Copy:
    """The device's bandwidth: an elementwise kernel over ``size`` bytes, which it reads once and writes once."""

    kernel = "torch.neg int32"

    def __init__(self, clock: Clock, size: int) -> None:
        self.clock, self.size = clock, size
        self.bytes = 2 * size

    def samples(self, repeats: int) -> np.ndarray:
        """Microseconds of each of ``repeats`` copies, float64. The buffers live as long as this takes."""
        source = torch.arange(self.size // 4, dtype=torch.int32, device=self.clock.device)
        target = torch.empty_like(source)

        def copy() -> None:
            torch.neg(source, out=target)

        copy()
        return self.clock.time(copy, repeats)

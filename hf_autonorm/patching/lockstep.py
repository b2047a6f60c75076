"""Runs several forward passes side by side, layer after layer.

Fitting a layer needs what all batches bring to it, and the next layer needs the fitted outputs of this one. One pass
per layer would cost as many passes as there are layers. Here every batch's pass runs in a thread of its own that
pauses where it meets a layer not yet dealt with; when all have paused (or ended), that layer is dealt with and they
go on. One thread runs at a time, in order, so the result does not depend on timing.
"""

from __future__ import annotations

import contextvars
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch


class _Abort(BaseException):
    """Ends the paused threads after one of them has failed."""


class _Autocast:
    """The autocast modes of the thread that creates it, for another thread to enter."""

    def __init__(self) -> None:
        devices = ["cpu"]
        if torch.accelerator.is_available():
            devices.append(torch.accelerator.current_accelerator().type)
        self._modes = [
            torch.autocast(device, dtype=torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device))
            for device in devices
        ]

    def __enter__(self) -> None:
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Runner:
    """One paused or running pass."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.waiting_for: Any = None
        self.payload: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.finished = self.abort = False
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._autocast = _Autocast()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run, work), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        self._go.acquire()
        try:
            if not self.abort:
                with torch.no_grad(), self._autocast:  # modes that belong to a thread
                    self.result = work()
        except _Abort:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self._paused.release()

    def resume(self) -> None:
        """Lets the pass run until it pauses again or ends."""
        self._go.release()
        self._paused.acquire()

    def pause(self, key: Any, payload: Any) -> None:
        self.waiting_for, self.payload = key, payload
        self._paused.release()
        self._go.acquire()
        self.waiting_for = None
        if self.abort:
            raise _Abort


class Lockstep:
    """`run(works, deal)`: each work calls `meet(key, payload)` where it reaches a layer; `deal(key, payloads)` is
    called once for a key, with the payloads of all passes that wait there, before any of them goes on."""

    def __init__(self) -> None:
        self._current: _Runner  # while `run` goes on
        self._done: set[Any] = set()
        self.current_index = 0  # which of the works is running

    def meet(self, key: Any, payload: Any) -> None:
        if self._current.abort:  # the model swallowed it
            raise _Abort
        if key not in self._done:
            self._current.pause(key, payload)

    def run(self, works: list[Callable[[], Any]], deal: Callable[[Any, list[Any]], None]) -> list[Any]:
        """The results of the works, in order. An exception of any of them, or of `deal`, ends all and is raised."""
        runners = [_Runner(work) for work in works]
        try:
            while any(not r.finished for r in runners):
                for index, runner in enumerate(runners):
                    if not runner.finished and (runner.waiting_for is None or runner.waiting_for in self._done):
                        self._current, self.current_index = runner, index
                        runner.resume()
                        if runner.error is not None:
                            raise runner.error
                waiting = [r for r in runners if not r.finished]
                if waiting:
                    # Passes may part ways (experts, skipped layers): the key most of them wait for comes first.
                    key = Counter(r.waiting_for for r in waiting).most_common(1)[0][0]
                    deal(key, [r.payload for r in waiting if r.waiting_for == key])
                    self._done.add(key)
        finally:
            for runner in runners:
                if not runner.finished:
                    self._current = runner
                    runner.abort = True
                    runner.resume()
        return [r.result for r in runners]

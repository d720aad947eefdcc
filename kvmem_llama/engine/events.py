"""A bounded queue of events from the owner thread to one reader."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

CAPACITY: Final = 4096  # events; at one per token a reader may lag by a long answer


class ReadAlready(RuntimeError):
    """Another reader is at these events."""


class EventQueue:
    """Events of one task, in order, at most 2 x `capacity` of them in memory.

    A reader that falls `capacity` events behind pauses its task (`behind`), and only its task: nothing is
    lost. Without a reader the oldest events are dropped and counted, for nobody may ever come to read them.
    """

    def __init__(self, wake: Callable[[], None], capacity: int = CAPACITY) -> None:
        self._wake = wake
        self._capacity = capacity
        self._events: deque[object] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._reader: int | None = None  # identity of the reading thread
        self._told: Callable[[], None] | None = None  # of a reader that does not wait
        self.n_dropped = 0

    @property
    def behind(self) -> bool:
        """The reader has fallen `capacity` events behind."""
        return self._reader is not None and len(self._events) >= self._capacity

    def put(self, event: object) -> None:
        """Appends; never waits. Owner thread."""
        with self._changed:
            limit = self._capacity if self._reader is None else 2 * self._capacity
            if len(self._events) >= limit:
                self._events.popleft()
                self.n_dropped += 1
            told = None if self._events else self._told
            self._events.append(event)
            self._changed.notify()
        if told is not None:
            told()

    def close(self) -> None:
        """No more events will come; a reader ends after the last one."""
        with self._changed:
            told, self._closed = self._told, True
            self._changed.notify()
        if told is not None:
            told()

    def read(self) -> Iterator[object]:
        """Events until the queue is closed and empty. One reader at a time; ReadAlready for a second."""
        self._attach(None)
        try:
            while True:
                with self._changed:
                    while not self._events and not self._closed:
                        self._changed.wait()
                    if not self._events:
                        return
                    was_behind = self.behind
                    event = self._events.popleft()
                if was_behind and not self.behind:
                    self._wake()
                yield event
        finally:
            self._detach()

    def watch(self, told: Callable[[], None]) -> None:
        """A reader that must not wait: takes events with `take`, until `unwatch`.

        told: called, by any thread, when there is something to take after there was nothing, and at the end.
        """
        self._attach(told)

    def take(self) -> tuple[list[object], bool]:
        """All events there are now, for the reader that watches -> (events, none will follow)."""
        with self._changed:
            was_behind = self.behind
            events = list(self._events)
            self._events.clear()
            closed = self._closed
        if was_behind:
            self._wake()
        return events, closed

    def unwatch(self) -> None:
        """The reader that watches has gone."""
        self._detach()

    def abandon(self) -> None:
        """The calling thread will wait for the task: if it is the reader, it can no longer read."""
        if self._reader == threading.get_ident():
            self._detach()

    def _attach(self, told: Callable[[], None] | None) -> None:
        with self._changed:
            if self._reader is not None:
                raise ReadAlready("the events of this task are being read already")
            self._reader, self._told = threading.get_ident(), told

    def _detach(self) -> None:
        with self._changed:
            self._reader = self._told = None
        self._wake()  # the task may have been paused for this reader

"""How much work is taken at once: choices in flight, running or queued, have a limit; above it 429."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from service.errors import ApiError, bad_request, queue_full


class Place:
    """What one HTTP request holds of the limit: one choice until it is known how many it asks for."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.num_choices = 1

    def claim(self, num_choices: int, param: str = "n") -> None:
        """Hold ``num_choices`` instead of one.

        Raises:
            ApiError: 429 if they do not fit now, 400 naming ``param`` if they never will.
        """
        self._admission.change(self.num_choices, num_choices, param)
        self.num_choices = num_choices


class Admission:
    """Counts the choices in flight. Called from the event loop only."""

    def __init__(self, max_running: int, max_queued: int) -> None:
        """
        Args:
            max_running: Requests that run in one step of the engine.
            max_queued: Requests that may wait for it.
        """
        self.limit = max_running + max_queued
        self.num_choices = 0

    @contextmanager
    def place(self) -> Iterator[Place]:
        """A place in the queue, for a request whose body is there: one that is still sent takes none from others.

        Raises:
            ApiError: 429: there is none.
        """
        self.change(0, 1)
        place = Place(self)
        try:
            yield place
        finally:
            self.num_choices -= place.num_choices

    def check_room(self) -> None:
        """Refuse a request before its body is read where it would find no place. Raises ``ApiError`` (429)."""
        if self.num_choices >= self.limit:
            raise self._full()

    def change(self, held: int, wanted: int, param: str = "n") -> None:
        """Exchange ``held`` choices for ``wanted``. Raises ``ApiError`` as `Place.claim`."""
        if wanted > self.limit:
            raise bad_request(f"At most {self.limit} choices can run and wait at once, not {wanted}.", param)
        if self.num_choices - held + wanted > self.limit:
            raise self._full()
        self.num_choices += wanted - held

    def _full(self) -> ApiError:
        return queue_full(f"{self.limit} choices run or wait already")

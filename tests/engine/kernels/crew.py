"""Programs that wait for each other, in Triton's interpreter, which runs one after the other.

Each program of a team is a thread here, of which one runs at a time: until it waits for the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition, Thread, current_thread
from typing import Any

from triton.runtime import interpreter

from engine.kernels import team


class Crew:
    """One row's programs."""

    def __init__(self, row: int, members: int) -> None:
        self._row, self._members = row, members
        self._turn, self._left = Condition(), set(range(members))
        self._now = 0
        self._faults: list[BaseException] = []

    def run(self, kernel: Any, arguments: dict[str, Any]) -> None:
        def work(member: int) -> None:
            try:
                self._await(member)
                kernel(**arguments)
            except BaseException as fault:
                self._faults.append(fault)
            finally:
                self._left.discard(member)
                self._pass_on(member)

        threads = [Thread(target=work, args=(member,), daemon=True) for member in range(self._members)]
        for member, thread in enumerate(threads):
            thread.name = str(member)
            thread.start()
        for thread in threads:
            thread.join()
        if self._faults:
            raise self._faults[0]

    def wait(self, member: int) -> None:
        """Lets the others run."""
        if self._faults or self._left == {member}:
            raise RuntimeError(f"member {member} waits for postings that nobody will make")
        self._pass_on(member)
        self._await(member)

    def _pass_on(self, member: int) -> None:
        with self._turn:
            order = [(member + ahead) % self._members for ahead in range(1, self._members + 1)]
            self._now = next((one for one in order if one in self._left), member)
            self._turn.notify_all()

    def _await(self, member: int) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._now == member)
            interpreter.interpreter_builder.set_grid_idx(self._row, member, 0)


@contextmanager
def side_by_side() -> Iterator[list[int]]:
    """Launches of teams run as on a GPU; the list has the size of each."""
    alone, elsewhere = interpreter.GridExecutor.__call__, team._elsewhere
    sizes: list[int] = []
    crews: list[Crew] = []

    def launch(executor: Any, *args: Any, **options: Any) -> None:
        rows, members = (*executor.grid, 1)[:2]
        names = inspect.getfullargspec(executor.fn).args
        if members == 1 or "members" not in names:
            return alone(executor, *args, **options)  # type: ignore[no-any-return]
        sizes.append(members)
        known = {name: value for name, value in options.items() if name in names}
        scope = interpreter._patch_lang(executor.fn)
        try:
            arguments = {
                name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in inspect.getcallargs(executor.fn, *args, **known).items()
            }
            interpreter.interpreter_builder.set_grid_dim(rows, members, 1)
            for row in range(rows):
                crews[:] = [Crew(row, members)]
                crews[0].run(executor.fn, arguments)
        finally:
            scope.restore()

    interpreter.GridExecutor.__call__ = launch
    team._elsewhere = lambda missing: int(missing) and crews[0].wait(int(current_thread().name))
    try:
        yield sizes
    finally:
        interpreter.GridExecutor.__call__, team._elsewhere = alone, elsewhere

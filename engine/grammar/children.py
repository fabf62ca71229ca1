"""The processes that work on grammars, forked from one that has the libraries loaded and runs nothing else.

The engine itself never loads them, and whatever a grammar does to time or memory ends with its process.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from engine.types import GrammarSpec

START_SECONDS = 60.0
"""How long a process may take to start."""

_CONTEXT = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


class Child:
    """A process that sends ``None`` first, when it is ready. Close it, in whatever way it ends.

    Args:
        target: Called in the process with its end of the connection and ``args``.

    Raises:
        EOFError, OSError: It cannot be started.
    """

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.connection, theirs = _CONTEXT.Pipe()
        self._lifeline, watched = _CONTEXT.Pipe()
        self._process: ForkServerProcess = _CONTEXT.Process(
            target=_run, args=(watched, target, theirs, *args), name="grammar", daemon=True
        )
        with _starting:
            _CONTEXT.set_forkserver_preload(["engine.grammar.job", "engine.grammar.follow"])
            self._process.start()
        theirs.close()
        watched.close()

    def receive(self, seconds: float) -> Any:
        """The next message.

        Raises:
            TimeoutError: None came in time.
            EOFError, OSError: The process ended.
        """
        if not self.connection.poll(seconds):
            raise TimeoutError(f"no answer after {seconds:g} s")
        return self.connection.recv()

    def close(self) -> int | None:
        """End the process, whatever it does; its exit code. Idempotent."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._lifeline.close()
        return self._process.exitcode


def _run(watched: Connection, target: Callable[..., None], *args: Any) -> None:
    """Run ``target``, and end with the engine, which holds the other side of ``watched``, whatever is done then.

    A thread could not see to that: the library's long calls keep the interpreter's lock. The kernel can, by a
    signal that ends a process, at the hang-up.
    """
    descriptor = watched.fileno()
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | fcntl.FASYNC)
    with suppress(EOFError, ConnectionError):  # the engine is gone, and the signal not here yet
        target(*args)


def compile_one(connection: Connection, spec: GrammarSpec, table: list[bytes], time_limit: float) -> None:
    """Target of a ``Child``: see ``job.run``."""
    from engine.grammar import job

    job.run(connection, spec, table, time_limit)


def follow_all(connection: Connection, table: list[bytes]) -> None:
    """Target of a ``Child``: see ``follow.run``."""
    from engine.grammar import follow

    follow.run(connection, table)

"""Requests with a grammar wait here, outside of the scheduler, until it is compiled; the engine's loop goes on."""

from __future__ import annotations

import importlib.util
import logging
import signal
import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from engine.errors import ConfigError, RequestError
from engine.grammar import children
from engine.grammar.limits import OUT_OF_TIME
from engine.grammar.walker import Constraint, GrammarWalker
from engine.token_bytes import read_tokenizer, token_bytes
from engine.types import ErrorInfo, GrammarSpec, Request

COMPILE_SECONDS = 5.0
"""Default for ``time_limit``."""
PATIENCE = 4
"""Most time of the clock for one compilation, in its ``time_limit``: a loaded machine takes longer."""
MAX_CHARS = 1 << 16
"""Longest text of a grammar."""
WORKERS = 2
"""Compilations at once."""
CACHE_ENTRIES = 256
CACHE_BYTES = 256 << 20
"""Bounds of the grammars that are kept compiled, those of running requests aside."""

_CRASHES = frozenset({-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV})
"""Exit codes of a process that ran into its limit of memory, or of the stack, where the library does not look."""

logger = logging.getLogger(__name__)


class _Refused(Exception):
    """The grammar, or the tokenizer, is at fault."""


class _Interrupted(Exception):
    """Something else than the grammar ended the compilation: another one may succeed."""


class GrammarCompiler:
    """Compiles grammars in processes of their own, with limits, and keeps the results.

    Args:
        tokenizer_dir: Directory of ``tokenizer.json``.
        vocab_size: Ids of the model.
        eos_token_ids: The model's end-of-sequence ids, which are no text.
        time_limit: Most seconds of processor time of one compilation.
    """

    def __init__(
        self,
        tokenizer_dir: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        time_limit: float = COMPILE_SECONDS,
    ) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._time_limit = time_limit
        self._available = importlib.util.find_spec("xgrammar") is not None
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._table: list[bytes] | None = None
        self._walkers: dict[bool, GrammarWalker] = {}
        self._compiled: OrderedDict[GrammarSpec, Future[str]] = OrderedDict()
        self._waiting: dict[str, tuple[Request, Future[str]]] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet, or was not taken."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def submit(self, request: Request) -> None:
        """Start to compile the request's grammar, unless it is known; ``take`` gives it back.

        Raises:
            RequestError: It is refused at once.
        """
        spec = request.params.grammar
        assert spec is not None, f"request {request.request_id} has no grammar"
        if not self._available:
            message = "structured output needs the package xgrammar, which is not installed"
            raise RequestError(message, spec.param)
        if len(spec.text) > MAX_CHARS:
            raise RequestError(f"the grammar is longer than {MAX_CHARS} characters", spec.param)
        if request.params.min_tokens:
            raise RequestError("min_tokens cannot be combined with a grammar", "min_tokens")
        future = self._compiled.get(spec)
        if future is None:
            future = self._compiled[spec] = self._pool.submit(self._compile, spec)
        self._compiled.move_to_end(spec)
        self._waiting[request.request_id] = request, future

    def abort(self, request_id: str) -> None:
        """Forget a waiting request; unknown ids are ignored. What is being compiled is kept for the next one."""
        entry = self._waiting.pop(request_id, None)
        if entry is None:
            return
        request, future = entry
        wanted = any(other is future for _, other in self._waiting.values())
        if not wanted and future.cancel():
            self._forget(request, future)

    def take(self) -> list[tuple[Request, Constraint | ErrorInfo]]:
        """The requests that need not wait any longer, each with its constraint or what is wrong with it."""
        done = [request for request, future in self._waiting.values() if future.done()]
        taken = [(request, self._outcome(request)) for request in done]
        if done:
            self._evict()
        return taken

    def wait(self, seconds: float) -> None:
        """Return when a waiting request can be taken, or after ``seconds``."""
        wait([future for _, future in self._waiting.values()], seconds, FIRST_COMPLETED)

    def walker(self, *, slow: bool = False) -> GrammarWalker:
        """Follows the grammars that were compiled here; another one those that are slow, for the others' sake."""
        if slow not in self._walkers:
            assert self._table is not None, "a constraint was compiled for a vocabulary"
            self._walkers[slow] = GrammarWalker(self._table)
        return self._walkers[slow]

    def close(self) -> None:
        """Start nothing more; what is being compiled ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for walker in self._walkers.values():
            walker.close()

    def _outcome(self, request: Request) -> Constraint | ErrorInfo:
        _, future = self._waiting.pop(request.request_id)
        spec = request.params.grammar
        assert spec is not None, "submit() takes requests with a grammar"
        error = future.exception()
        if error is None:
            return Constraint(future.result(), request.params.stop_token_ids, spec.param)
        if isinstance(error, _Refused):
            return ErrorInfo("invalid_request", str(error), spec.param)
        # Not the grammar's fault: the next request tries again
        self._forget(request, future)
        if isinstance(error, _Interrupted):
            logger.warning("a compilation was interrupted: %s", error)
            return ErrorInfo("unavailable", "the compilation of the grammar was interrupted; try again")
        return ErrorInfo("internal_error", f"the grammar could not be compiled: {error!r}")

    def _forget(self, request: Request, future: Future[str]) -> None:
        """Do not keep ``future``; another one for the same grammar, begun since, is kept."""
        spec = request.params.grammar
        if spec is not None and self._compiled.get(spec) is future:
            del self._compiled[spec]

    def _evict(self) -> None:
        """Drop the grammars that were not used for longest."""
        sizes = {
            spec: len(future.result()) if future.exception() is None else 0
            for spec, future in self._compiled.items()
            if future.done()
        }
        total = sum(sizes.values())
        for spec, size in sizes.items():
            if len(self._compiled) <= CACHE_ENTRIES and total <= CACHE_BYTES:
                return
            del self._compiled[spec]
            total -= size

    # --- in the pool's threads ------------------------------------------------------------------------------

    def _compile(self, spec: GrammarSpec) -> str:
        with self._lock:
            if self._table is None:
                self._table = self._token_texts()
        return _compile_apart(spec, self._table, self._time_limit)

    def _token_texts(self) -> list[bytes]:
        try:
            known = token_bytes(read_tokenizer(self._tokenizer_dir))
        except ConfigError as exc:
            raise _Refused(f"structured output is not possible with this model: {exc}") from None
        if known.separated:
            raise _Refused("structured output is not possible with this model: its tokens are separate words")
        silent = known.special.union(self._eos_token_ids)
        return [b"" if token in silent else known.of(token) for token in range(self._vocab_size)]


def _compile_apart(spec: GrammarSpec, table: list[bytes], time_limit: float) -> str:
    """Compile in a process that has limits of time and memory; the serialised grammar.

    Raises:
        _Refused: The grammar is at fault.
        _Interrupted: The process did not start, was ended from outside, or got too little of the processor.
    """
    try:
        child = children.Child(children.compile_one, spec, table, time_limit)
    except (EOFError, OSError) as exc:
        raise _Interrupted(f"no process: {exc!r}") from exc
    try:
        child.receive(children.START_SECONDS)
        compiled, text = child.receive(PATIENCE * time_limit)
    except (EOFError, OSError) as exc:
        raise _reason(exc, child.close(), time_limit) from None
    finally:
        child.close()
    if not compiled:
        raise _Refused(f"the grammar is not valid: {text}")
    return str(text)


def _reason(found: Exception, exit_code: int | None, time_limit: float) -> Exception:
    """Why a process gave no answer."""
    if exit_code == OUT_OF_TIME:
        return _Refused(f"the grammar takes more than {time_limit:g} s to compile")
    if exit_code in _CRASHES:
        return _Refused("the grammar needs too much memory or is nested too deeply")
    if exit_code == 1:
        return found  # an error of our own, whose traceback is in the log
    return _Interrupted(f"{found!r}, exit code {exit_code}")

"""Typed errors of the engine: what a user, a configuration, a checkpoint or a full pool can cause."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class ConfigError(EngineError):
    """An option or a ``config.json`` value that cannot be honoured; the message names key and value."""


class CheckpointError(EngineError):
    """A checkpoint directory that is damaged, incomplete or holds what no parameter wants."""


class RequestError(EngineError):
    """A request that can never be served as asked.

    Args:
        message: What is wrong, with the numbers a client needs to mend it.
        param: The request field at fault, in the names of ``SamplingParams`` or ``Request``.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(EngineError):
    """The engine process is gone or was told to stop; the request was not, or not wholly, served."""

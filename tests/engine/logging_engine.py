"""An engine whose load logs from the engine's own modules and as the service does, and then refuses its options."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NoReturn

import structlog

from engine import bundle_writer, ladder
from engine.errors import ConfigError
from engine.options import EngineOptions
from engine.types import Progress

LOGGING_FACTORY = "tests.engine.logging_engine:LoggingEngine"


class LoggingEngine:
    @classmethod
    def load(cls, options: EngineOptions, progress: Callable[[Progress], None]) -> NoReturn:
        structlog.get_logger("service.lifecycle").warning("from_the_service", request="r")
        ladder.logger.debug("request %s is fine", "r")
        ladder.logger.warning("request %s tripped at token %d", "r", 7)
        try:
            raise OSError("No space left")
        except OSError:
            bundle_writer.logger.exception("no bundle of request %s", "r")
        warnings.warn("a library's warning", stacklevel=1)
        raise ConfigError("model='fake': logged enough")

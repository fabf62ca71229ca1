"""What the routes share: made once by ``create_app``, found at ``request.app.state.service``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from engine.client import EngineClient
from engine.token_bytes import TokenBytes
from service.admission import Admission
from service.body_reader import BodyReader
from service.chat_output import REASONING_MARKS, TOOL_MARKS, ChatMarks
from service.errors import model_not_found
from service.lifecycle import Lifecycle
from service.metrics import ServiceMetrics
from service.prompts import ModelLimits
from service.settings import Settings
from service.text import Tokenizer
from service.tokenizing import TokenizerQueue
from service.tracing import Tracer


@dataclass(slots=True)
class Service:
    """One served model and everything around it."""

    settings: Settings
    client: EngineClient
    metrics: ServiceMetrics
    tokenizer: Tokenizer
    lifecycle: Lifecycle
    tracer: Tracer | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start, told by ``/v1/models``."""
    admission: Admission = field(init=False)
    bodies: BodyReader = field(init=False)
    tokenizer_queue: TokenizerQueue = field(default_factory=TokenizerQueue)
    chat_marks: ChatMarks = field(init=False)
    chat_token_bytes: TokenBytes = field(init=False)
    """What each token adds to a text in which the marks are looked for."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.admission = Admission(settings.max_num_seqs, settings.max_queued_requests)
        self.bodies = BodyReader(
            settings.max_body_bytes, settings.max_total_body_bytes, settings.request_timeout
        )
        self.lifecycle.on_drain = self.bodies.end_all
        self.chat_marks = ChatMarks.choose(
            settings.reasoning_parser, settings.tool_call_parser, self.tokenizer.has_token
        )
        self.chat_token_bytes = self.tokenizer.token_bytes_with((*REASONING_MARKS, *TOOL_MARKS))

    def limits(self) -> ModelLimits:
        """What requests are checked against. Raises ``ApiError`` (503) unless requests are taken."""
        self.lifecycle.check_accepting()
        return ModelLimits(self.client.info, self.tokenizer)

    def check_model(self, name: str | None) -> str:
        """The served name for the one that a client asked for. Raises ``ApiError`` (404)."""
        served = self.settings.model_name
        if name is not None and name != served:
            raise model_not_found(name)
        return served


def service_of(request: Request) -> Service:
    """The service that answers ``request``."""
    service = request.app.state.service
    assert isinstance(service, Service), "the app was not made by create_app"
    return service

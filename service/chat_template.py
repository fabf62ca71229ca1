"""Chat templates: Jinja as Hugging Face checkpoints use it, in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ConfigError

NO_TEMPLATE = (
    "This model has no chat template: use /v1/completions, or add chat_template.jinja "
    "(or chat_template in tokenizer_config.json) to its tokenizer directory and start again."
)
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
)
"""Template variables that a request cannot set through ``chat_template_kwargs``."""


class ChatTemplateError(Exception):
    """A conversation that cannot be rendered; the message is for the client."""


class ChatTemplate:
    """One template, compiled at start; one that does not compile makes chat requests fail, not the start."""

    def __init__(self, source: str | None) -> None:
        self._problem = NO_TEMPLATE
        self.takes_tools = False
        """Whether the template looks at the variable ``tools``."""
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                environment = _environment()
                self._template = environment.from_string(source)
                self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
            except (jinja2.TemplateError, RecursionError) as exc:
                self._problem = f"The model's chat template is not valid: {exc}"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChatTemplate:
        """The template of a ``tokenizer_config.json``: text, or named ones of which "default" is used.

        Raises:
            ConfigError: ``chat_template`` has another form.
        """
        source = config.get("chat_template")
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        if source is not None and not isinstance(source, str):
            raise ConfigError("tokenizer_config.json: chat_template must be text or named templates")
        return cls(source)

    @property
    def is_valid(self) -> bool:
        """Whether there is a template."""
        return self._template is not None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt text.

        Raises:
            ChatTemplateError: There is no template, it raised, or its output is not Unicode text.
        """
        if self._template is None:
            raise ChatTemplateError(self._problem)
        try:
            text = self._template.render(**variables, messages=messages)
            text.encode("utf-8")
        # A template is a program: with unexpected variables it may raise anything.
        except Exception as exc:
            reason = str(exc)[:500] or type(exc).__name__
            raise ChatTemplateError(f"The chat template refused the conversation: {reason}") from exc
        return text


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)

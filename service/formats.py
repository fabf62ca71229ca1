"""What an endpoint makes of the deltas: a response, or the chunks of a stream. Here what both share, and
``/v1/completions``; the chat endpoint's shapes are in ``service/chat_format.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType

from engine.types import TokenLogprobs
from service import responses as out
from service.chat_output import ChatOutput
from service.generation import ChoiceDelta, Generation
from service.prompt_scores import finite, prompt_logprobs, prompt_offsets, prompt_text
from service.prompts import EncodedPrompt
from service.text import Tokenizer


class ResponseHead(NamedTuple):
    """What every chunk of a response repeats, and what was asked for."""

    id: str
    created: int
    model: str
    prompts: Sequence[EncodedPrompt]
    n: int
    include_usage: bool
    return_token_ids: bool
    echo: bool = False
    logprobs: int | None = None
    """Top alternatives of each token in the answer; ``None``: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for ``prompt_logprobs``."""
    new_chat_output: Callable[[], ChatOutput] | None = None
    """Makes what tells reasoning and tool calls of a choice from its content, where that is wanted."""


class Format(Protocol):
    """One endpoint's shapes. All bytes are JSON."""

    @property
    def head(self) -> ResponseHead: ...

    def opening(self) -> Iterator[bytes]:
        """Chunks before the first delta."""
        ...

    def chunk(self, delta: ChoiceDelta) -> bytes | None:
        """A chunk, or ``None`` where there is nothing to tell yet."""
        ...

    def usage_chunk(self, generation: Generation) -> bytes:
        """The last chunk of a stream that asked for its usage."""
        ...

    def response(self, deltas: Sequence[ChoiceDelta], generation: Generation) -> bytes:
        """The whole answer."""
        ...


class CompletionFormat:
    """``/v1/completions``."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._usage: UnsetType | None = None if head.include_usage else UNSET

    def opening(self) -> Iterator[bytes]:
        head = self.head
        if not (head.echo or head.return_token_ids):
            return
        for index in range(len(head.prompts) * head.n):
            prompt = head.prompts[index // head.n]
            # With log-probabilities the text comes with them, in the first delta
            text = "" if head.logprobs is not None else self._echoed(prompt)
            choice = out.CompletionChoice(index, text, None, None)
            if head.return_token_ids:
                choice.token_ids = []
                choice.prompt_token_ids = prompt.token_ids
            yield self._encode([choice])

    def chunk(self, delta: ChoiceDelta) -> bytes | None:
        if not worth_a_chunk(delta, self.head) and not self._echoes_scores(delta):
            return None
        text = delta.text
        if self._echoes_scores(delta):
            text = self._echoed(self.head.prompts[delta.choice // self.head.n]) + text
        choice = out.CompletionChoice(delta.choice, text, self._logprobs([delta]), delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.head.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            choice.num_accepted_tokens = delta.num_accepted
        return self._encode([choice])

    def usage_chunk(self, generation: Generation) -> bytes:
        return self._final([], generation)

    def response(self, deltas: Sequence[ChoiceDelta], generation: Generation) -> bytes:
        choices = [self._whole(index, mine) for index, mine in enumerate(by_choice(deltas, generation))]
        return self._final(choices, generation)

    def _whole(self, index: int, deltas: Sequence[ChoiceDelta]) -> out.CompletionChoice:
        head, last = self.head, deltas[-1]
        prompt = head.prompts[index // head.n]
        text = self._echoed(prompt) + "".join(delta.text for delta in deltas)
        choice = out.CompletionChoice(
            index, text, self._logprobs(deltas), last.finish_reason, last.stop_reason
        )
        if head.return_token_ids:
            choice.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            choice.prompt_token_ids = prompt.token_ids
        if head.prompt_logprobs is not None:
            scores = deltas[0].prompt_logprobs or ()
            choice.prompt_logprobs = prompt_logprobs(scores, head.prompt_logprobs, self._tokenizer)
        return choice

    def _encode(self, choices: list[out.CompletionChoice]) -> bytes:
        head = self.head
        return out.encode(
            out.Completion(head.id, "text_completion", head.created, head.model, choices, self._usage)
        )

    def _final(self, choices: list[out.CompletionChoice], generation: Generation) -> bytes:
        head = self.head
        body = out.Completion(head.id, "text_completion", head.created, head.model, choices)
        body.usage = usage(head, generation)
        body.metrics = metrics(generation)
        return out.encode(body)

    def _echoed(self, prompt: EncodedPrompt) -> str:
        return prompt_text(prompt, self._tokenizer) if self.head.echo else ""

    def _echoes_scores(self, delta: ChoiceDelta) -> bool:
        """Whether ``delta`` brings the log-probabilities of an echoed prompt."""
        return self.head.echo and self.head.logprobs is not None and delta.prompt_logprobs is not None

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> out.CompletionLogprobs | None:
        echoing = self._echoes_scores(deltas[0])
        if not echoing and all(delta.logprobs is None for delta in deltas):
            return None
        told = out.CompletionLogprobs([], [], [], [])
        if echoing:
            self._tell_prompt(deltas[0], told)
        self._tell(told, [entry for delta in deltas for entry in delta.logprobs or ()])
        told.text_offset += [offset for delta in deltas for offset in delta.offsets or ()]
        return told

    def _tell_prompt(self, delta: ChoiceDelta, told: out.CompletionLogprobs) -> None:
        token_ids = self.head.prompts[delta.choice // self.head.n].token_ids
        told.text_offset += prompt_offsets(token_ids, self._tokenizer)
        told.tokens.append(self._tokenizer.token_text(token_ids[0]))
        told.token_logprobs.append(None)
        told.top_logprobs.append(None)
        self._tell(told, delta.prompt_logprobs or ())

    def _tell(self, told: out.CompletionLogprobs, entries: Sequence[TokenLogprobs]) -> None:
        told.tokens += [self._tokenizer.token_text(entry.token_id) for entry in entries]
        told.token_logprobs += [finite(entry.logprob) for entry in entries]
        told.top_logprobs += [self._top(entry) for entry in entries]

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        text = self._tokenizer.token_text
        top: dict[str, float] = {}
        # Two ids can have the same text; the more probable one keeps the key.
        for token_id, logprob in (*entry.top[: self.head.logprobs], (entry.token_id, entry.logprob)):
            top.setdefault(text(token_id), finite(logprob))
        return top


def worth_a_chunk(delta: ChoiceDelta, head: ResponseHead) -> bool:
    """False while all that a delta gave is held back."""
    told = delta.text or delta.finish_reason is not None or delta.logprobs
    return bool(told or (head.return_token_ids and delta.token_ids))


def by_choice(deltas: Sequence[ChoiceDelta], generation: Generation) -> list[list[ChoiceDelta]]:
    """The deltas of each choice, in order."""
    grouped: list[list[ChoiceDelta]] = [[] for _ in generation.choices]
    for delta in deltas:
        grouped[delta.choice].append(delta)
    return grouped


def metrics(generation: Generation) -> out.Metrics:
    """What speculation did for a request, and where its time went."""
    return out.Metrics(generation.spec_stats.summary(), generation.timing())


def usage(head: ResponseHead, generation: Generation) -> out.Usage:
    """Token counts so far."""
    num_prompt = sum(len(prompt.token_ids) for prompt in head.prompts)
    num_completion = generation.num_completion_tokens
    details = out.PromptTokensDetails(generation.num_cached_tokens)
    return out.Usage(num_prompt, num_completion, num_prompt + num_completion, details)

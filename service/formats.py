"""What an endpoint makes of the deltas: a response, or the chunks of a stream. Here what both share, and
``/v1/completions``; the chat endpoint's shapes are in ``service/chat_format.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

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

    @property
    def prompt_size(self) -> int:
        """Prompt tokens that the choices tell as text or as ids, about."""
        told = self.echo or self.return_token_ids
        return self.n * sum(len(prompt.token_ids) for prompt in self.prompts) if told else 0


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


class _PromptPart(NamedTuple):
    """What each choice of a prompt tells of it."""

    text: str
    logprobs: out.CompletionLogprobs | None
    prompt_logprobs: out.PromptLogprobs | UnsetType


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
        prompt = self.head.prompts[delta.choice // self.head.n]
        scores = self._echoed_scores(prompt, delta)
        if scores is None and not worth_a_chunk(delta, self.head):
            return None
        text = delta.text if scores is None else self._echoed(prompt) + delta.text
        logprobs = self._logprobs(scores, [delta])
        choice = out.CompletionChoice(delta.choice, text, logprobs, delta.finish_reason)
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.head.return_token_ids:
            choice.token_ids = list(delta.token_ids)
            choice.num_accepted_tokens = delta.num_accepted
        return self._encode([choice])

    def usage_chunk(self, generation: Generation) -> bytes:
        return self._final([], generation)

    def response(self, deltas: Sequence[ChoiceDelta], generation: Generation) -> bytes:
        n, grouped = self.head.n, by_choice(deltas, generation)
        # The first choice of each prompt brings what all of them tell of it
        parts = [self._of_prompt(place, first[0]) for place, first in enumerate(grouped[::n])]
        whole = (self._whole(index, parts[index // n], mine) for index, mine in enumerate(grouped))
        return self._final([out.encoded(choice) for choice in whole], generation)

    def _of_prompt(self, place: int, first: ChoiceDelta) -> _PromptPart:
        head = self.head
        prompt, scores = head.prompts[place], first.prompt_logprobs or ()
        ranked: out.PromptLogprobs | UnsetType = UNSET
        if head.prompt_logprobs is not None:
            ranked = prompt_logprobs(scores, head.prompt_logprobs, self._tokenizer)
        return _PromptPart(self._echoed(prompt), self._echoed_scores(prompt, first), ranked)

    def _whole(self, index: int, part: _PromptPart, deltas: Sequence[ChoiceDelta]) -> out.CompletionChoice:
        head, last = self.head, deltas[-1]
        text = part.text + "".join(delta.text for delta in deltas)
        logprobs = self._logprobs(part.logprobs, deltas)
        choice = out.CompletionChoice(index, text, logprobs, last.finish_reason, last.stop_reason)
        if head.return_token_ids:
            choice.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            choice.prompt_token_ids = head.prompts[index // head.n].token_ids
        choice.prompt_logprobs = part.prompt_logprobs
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

    def _echoed_scores(self, prompt: EncodedPrompt, first: ChoiceDelta) -> out.CompletionLogprobs | None:
        """The log-probabilities of an echoed prompt, if ``first`` brings them."""
        if not self.head.echo or self.head.logprobs is None or first.prompt_logprobs is None:
            return None
        token_ids = prompt.token_ids
        offsets = prompt_offsets(token_ids, self._tokenizer)
        told = out.CompletionLogprobs(offsets, [None], [self._tokenizer.token_text(token_ids[0])], [None])
        self._tell(told, first.prompt_logprobs)
        return told

    def _logprobs(
        self, prompt: out.CompletionLogprobs | None, deltas: Sequence[ChoiceDelta]
    ) -> out.CompletionLogprobs | None:
        """Those of a choice behind those of its ``prompt``, which are left as they are."""
        if prompt is None and all(delta.logprobs is None for delta in deltas):
            return None
        known = () if prompt is None else astuple(prompt)
        told = out.CompletionLogprobs(*map(list, known)) if known else out.CompletionLogprobs([], [], [], [])
        self._tell(told, [entry for delta in deltas for entry in delta.logprobs or ()])
        told.text_offset += [offset for delta in deltas for offset in delta.offsets or ()]
        return told

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


def answer_size(deltas: Sequence[ChoiceDelta], head: ResponseHead) -> int:
    """Characters and log-probabilities, about, that a format tells of ``deltas``."""
    size = sum(len(delta.text) for delta in deltas)
    if head.logprobs is None and head.prompt_logprobs is None:
        return size
    width = 1 + max(head.logprobs or 0, head.prompt_logprobs or 0)
    # Each choice tells the scores of its prompt, which a whole answer has once
    scores = (len(delta.logprobs or ()) + head.n * len(delta.prompt_logprobs or ()) for delta in deltas)
    return size + width * sum(scores)


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

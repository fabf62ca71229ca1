"""The shapes of ``/v1/chat/completions``: messages and their deltas, reasoning and tool calls included."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from engine.types import TokenLogprobs
from service import responses as out
from service.chat_output import CallArguments, CallStart, ChatOutput, Content, Part, Reasoning
from service.formats import ResponseHead, by_choice, metrics, usage, worth_a_chunk
from service.generation import ChoiceDelta, Generation, KeptReason
from service.prompt_scores import finite, prompt_logprobs
from service.text import Tokenizer


class ChatFormat:
    """``/v1/chat/completions``: one prompt, so choice ``i`` is its ``i``-th completion."""

    def __init__(self, head: ResponseHead, tokenizer: Tokenizer) -> None:
        self.head = head
        self._tokenizer = tokenizer
        self._usage: UnsetType | None = None if head.include_usage else UNSET
        new_output = head.new_chat_output
        self._outputs = None if new_output is None else [new_output() for _ in range(head.n)]

    def opening(self) -> Iterator[bytes]:
        head = self.head
        for index in range(head.n):
            delta = out.ChatDelta(role="assistant", content="")
            chunk = self._chunk([out.ChatChunkChoice(index, delta, None, None)])
            if head.return_token_ids and index == 0:
                chunk.prompt_token_ids = head.prompts[0].token_ids
            yield out.encode(chunk)

    def chunk(self, delta: ChoiceDelta) -> bytes | None:
        reason: out.Reason | None = delta.finish_reason
        if self._outputs is None:
            said = out.ChatDelta(content=delta.text) if delta.text else out.ChatDelta()
            told = bool(delta.text)
        else:
            output = self._outputs[delta.choice]
            parts = output.push(delta.text)
            if delta.finish_reason is not None:
                parts += output.finish()
                reason = _reason(delta.finish_reason, output)
            said = _delta(parts)
            told = bool(parts)
        if not told and not worth_a_chunk(delta._replace(text=""), self.head):
            return None
        choice = out.ChatChunkChoice(delta.choice, said, self._logprobs([delta]), reason)
        if reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.head.return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return out.encode(self._chunk([choice]))

    def usage_chunk(self, generation: Generation) -> bytes:
        chunk = self._chunk([])
        chunk.usage = usage(self.head, generation)
        chunk.metrics = metrics(generation)
        return out.encode(chunk)

    def response(self, deltas: Sequence[ChoiceDelta], generation: Generation) -> bytes:
        head, grouped = self.head, by_choice(deltas, generation)
        body = out.ChatCompletion(
            head.id,
            "chat.completion",
            head.created,
            head.model,
            [out.encoded(self._whole(index, mine)) for index, mine in enumerate(grouped)],
            usage(head, generation),
            metrics(generation),
        )
        if head.return_token_ids:
            body.prompt_token_ids = head.prompts[0].token_ids
        if head.prompt_logprobs is not None:
            scores = grouped[0][0].prompt_logprobs or ()
            body.prompt_logprobs = prompt_logprobs(scores, head.prompt_logprobs, self._tokenizer)
        return out.encode(body)

    def _whole(self, index: int, deltas: Sequence[ChoiceDelta]) -> out.ChatChoice:
        last = deltas[-1]
        assert last.finish_reason is not None, "a whole choice has ended"
        text = "".join(delta.text for delta in deltas)
        reason: out.Reason = last.finish_reason
        message = out.ChatMessage("assistant", text)
        if self._outputs is not None:
            output = self._outputs[index]
            message = _message(output.push(text) + output.finish())
            reason = _reason(last.finish_reason, output)
        choice = out.ChatChoice(index, message, self._logprobs(deltas), reason, last.stop_reason)
        if self.head.return_token_ids:
            choice.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _chunk(self, choices: list[out.ChatChunkChoice]) -> out.ChatChunk:
        head = self.head
        return out.ChatChunk(head.id, "chat.completion.chunk", head.created, head.model, choices, self._usage)

    def _logprobs(self, deltas: Sequence[ChoiceDelta]) -> out.ChatLogprobs | None:
        if all(delta.logprobs is None for delta in deltas):
            return None
        entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        return out.ChatLogprobs([self._entry(entry) for entry in entries])

    def _entry(self, entry: TokenLogprobs) -> out.ChatTokenLogprob:
        text, data = self._tokenizer.token_text, self._tokenizer.token_bytes.of
        top = [out.TokenLogprob(text(i), finite(logprob), list(data(i))) for i, logprob in entry.top]
        token_id = entry.token_id
        return out.ChatTokenLogprob(text(token_id), finite(entry.logprob), list(data(token_id)), top)


def _reason(reason: KeptReason, output: ChatOutput) -> out.Reason:
    return "tool_calls" if reason == "stop" and output.num_calls else reason


def _message(parts: Sequence[Part]) -> out.ChatMessage:
    content = "".join(part.text for part in parts if isinstance(part, Content))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [
        out.ToolCall(_call_id(), out.FunctionCall(part.name, ""))
        for part in parts
        if isinstance(part, CallStart)
    ]
    for part in parts:
        if isinstance(part, CallArguments):
            calls[part.call].function.arguments += part.text
    message = out.ChatMessage("assistant", content if content or not calls else None)
    if reasoning:
        message.reasoning_content = reasoning
    if calls:
        message.tool_calls = calls
    return message


def _delta(parts: Sequence[Part]) -> out.ChatDelta:
    delta = out.ChatDelta()
    calls: dict[int, out.ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, Content):
            delta.content = (delta.content or "") + part.text
        elif isinstance(part, Reasoning):
            delta.reasoning_content = (delta.reasoning_content or "") + part.text
        elif isinstance(part, CallStart):
            function = out.FunctionDelta("", part.name)
            calls[part.call] = out.ToolCallDelta(part.call, function, _call_id(), "function")
        else:
            call = calls.setdefault(part.call, out.ToolCallDelta(part.call, out.FunctionDelta("")))
            call.function.arguments += part.text
    if calls:
        delta.tool_calls = list(calls.values())
    return delta


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

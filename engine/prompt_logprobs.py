"""Log-probabilities of prompt tokens: each prefilled position scores the known token after it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.guard import DRAFT, HALTING, Flag
from engine.model.decoder import Decoder
from engine.sequence import PrefillChunk, PrefillResult
from engine.staging import fetch, stage
from engine.state import FLAGS, SlotState
from engine.types import TokenLogprobs

MAX_LOGPROBS = 20
LOGITS_AT_ONCE = 1 << 23
"""Most float32 logits of a prefill that exist at once, however long the prompts are (32 MiB)."""


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of T tokens in a row."""

    own: Tensor  # [T] float32: log-probability of the token itself
    rank: Tensor  # [T] int64: its place by probability, from 1
    top_values: Tensor  # [T, 20] float32, fewer where the vocabulary is smaller
    top_ids: Tensor  # [T, 20] int64


class PendingPrefill:
    """A launched prefill whose results were not read yet.

    Args:
        chunks: Those of the prefill that tell something.
        flags: ``[len(chunks)]`` int64, the guard's flag words of their slots.
        scores: For each chunk, or ``None`` where no log-probabilities are wanted.
    """

    def __init__(self, chunks: list[PrefillChunk], flags: Tensor, scores: list[_Scores | None]) -> None:
        self._chunks = [(chunk, chunk.sequence.epoch) for chunk in chunks]
        self._flags = fetch(flags)
        self._scores = [None if one is None else _Scores(*map(fetch, _fields(one))) for one in scores]
        self._copied: torch.cuda.Event | None = None
        if flags.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def results(self) -> list[PrefillResult]:
        """Wait for the prefill and say what each chunk told."""
        if self._copied is not None:
            self._copied.synchronize()
        results = []
        for (chunk, epoch), flags, scores in zip(
            self._chunks, self._flags.tolist(), self._scores, strict=True
        ):
            logprobs = None if scores is None else _read(chunk, scores)
            results.append(PrefillResult(chunk.sequence, epoch, chunk.start, chunk.is_last, flags, logprobs))
        return results


@torch.inference_mode()
def tell(
    decoder: Decoder, state: SlotState, chunks: Seq[PrefillChunk], slots: Tensor, hidden: Tensor
) -> PendingPrefill | None:
    """What is to be read of ``chunks``, if anything.

    Args:
        slots: ``[len(chunks)]`` int64.
        hidden: ``[N, H]``, the target's states of all their tokens.
    """
    telling = [place for place, chunk in enumerate(chunks) if chunk.sequence.reads_prefill]
    if not telling:
        return None
    parts = hidden.split([len(chunk.token_ids) for chunk in chunks])
    scores = [
        _score(decoder, state.vocab_size, parts[place], chunks[place].shifted_ids)
        if chunks[place].sequence.needs_prompt_logits
        else None
        for place in telling
    ]
    places = stage(telling, torch.int64, slots.device)
    # A fault of the draft is told by the first step, if there will be one
    known = [int(HALTING | (DRAFT if chunks[place].sequence.only_prefills else 0)) for place in telling]
    flags = state.core[:, FLAGS].index_select(0, slots.index_select(0, places))
    flags &= stage(known, torch.int64, slots.device)
    spoilt = [
        one.own.isnan().any() if one is not None else flags.new_zeros((), dtype=torch.bool) for one in scores
    ]
    flags = flags | torch.stack(spoilt) * int(Flag.PREFILL_NAN)
    return PendingPrefill([chunks[place] for place in telling], flags, scores)


def _score(decoder: Decoder, vocab_size: int, hidden: Tensor, following: Seq[int]) -> _Scores:
    """Score the known token after each position under the target's raw distribution.

    Args:
        hidden: ``[T, H]``, the target's final hidden states.
        following: T token ids.
    """
    known = stage(following, torch.int64, hidden.device)
    at_once = max(1, LOGITS_AT_ONCE // vocab_size)
    parts = [
        _score_slice(decoder.logits(rows).float(), ids)
        for rows, ids in zip(hidden.split(at_once), known.split(at_once), strict=True)
    ]
    return _Scores(*(torch.cat(column) for column in zip(*map(_fields, parts), strict=True)))


def _score_slice(logits: Tensor, ids: Tensor) -> _Scores:
    """``logits`` ``[T, V]`` and the tokens ``[T]`` that followed."""
    log_probs = logits.log_softmax(dim=-1)
    own = log_probs.gather(1, ids[:, None])  # [T, 1]
    rank = (log_probs > own).sum(dim=-1) + 1
    top = log_probs.topk(min(MAX_LOGPROBS, log_probs.shape[-1]), dim=-1)
    return _Scores(own.squeeze(1), rank, top.values, top.indices)


def _fields(scores: _Scores) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return scores.own, scores.rank, scores.top_values, scores.top_ids


def _read(chunk: PrefillChunk, scores: _Scores) -> list[TokenLogprobs]:
    wanted = chunk.sequence.request.params.prompt_logprobs or 0
    rows = zip(chunk.shifted_ids, *(column.tolist() for column in _fields(scores)), strict=True)
    return [
        TokenLogprobs(token, own, list(zip(ids[:wanted], values[:wanted], strict=True)), rank)
        for token, own, rank, values, ids in rows
    ]

"""What the scheduler knows of a request, and the messages between it and the runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.kv.prefix import BlockKey, CachedBlock
from engine.types import FinishReason, Request, TokenLogprobs

if TYPE_CHECKING:
    from engine.grammar.walker import Constraint
    from engine.ladder import Suspicion


@dataclass(slots=True, eq=False)
class Sequence:
    """The scheduler's record of a live request. Compared by identity; only the scheduler changes it, and the ladder
    what concerns faults.

    Args:
        order: Place in every queue: (priority, arrival time, serial number).
        limit: Most tokens, prompt included: ``max_tokens`` or the context end, whichever comes first.
        stride: Positions that one step writes, W.
        constraint: The request's place in its grammar.
    """

    request: Request
    order: tuple[int, float, int]
    limit: int
    stride: int
    constraint: Constraint | None = None

    tokens: list[int] = field(init=False)
    """Prompt, then the output that was kept."""
    num_prompt: int = field(init=False)
    stop_ids: frozenset[int] = field(init=False)

    slot: int | None = None
    """``None`` while waiting and after the end."""
    pages: list[int] = field(default_factory=list)
    """Held pages, in order of position."""
    num_pages_synced: int = 0
    """Leading entries of ``pages`` that the runner was told of."""
    prefill_end: int = 0
    """Positions to prefill: all known tokens but the last, when the slot was bound."""
    prefilled: int = 0
    """Leading positions whose KV came from the cache or was ordered to be written by prefill."""
    steps_in_flight: int = 0
    """Steps that were planned and whose results were not processed yet."""
    epoch: int = 0
    """Grows whenever slot and pages go back: results of an older epoch are void."""
    finished: bool = False

    keys: list[BlockKey] = field(default_factory=list)
    """Names of the leading blocks of ``tokens``, computed once."""
    blocks: list[CachedBlock] = field(default_factory=list)
    """Published blocks that the leading ``pages`` are."""
    num_hit_blocks: int = 0
    """Leading ``blocks`` that the prefix cache gave at the last admission."""
    publishable: bool = True
    """False once a block could not, or must not, be published; nothing can follow it."""
    matched: list[CachedBlock] = field(default_factory=list)
    """While waiting: the longest published chain, as of ``match_generation`` of the prefix cache."""
    match_generation: int = -1

    suspicion: Suspicion | None = None
    """After a fault: how its next step is to be run, alone."""
    rebuilt: bool = False
    """After a fault its KV is computed anew, whole: nothing of it comes from the prefix cache."""
    num_rescues: int = 0
    """Times that it went on after a fault."""
    isolated: bool = False
    """After too many of them: every step of it runs alone and eager, and verifies its next token only."""
    held: bool = False
    """It is to step alone, and it is not its turn."""

    scheduled_time: float | None = None
    """When it first left the queue, monotonic seconds."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache at the first admission."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """What is known so far of those that were asked for, to tell in the first delta."""
    has_emitted: bool = False
    """A delta was returned: the facts of the first delta are told."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.stop_ids = frozenset(self.request.params.stop_token_ids)
        if self.request.params.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def needs_prompt_logits(self) -> bool:
        """Its prefill gives log-probabilities too, so that it must compute every position of the prompt."""
        return self.prompt_logprobs is not None and not self.has_emitted

    @property
    def uses_cache(self) -> bool:
        """Leading blocks may come from the prefix cache."""
        return not self.needs_prompt_logits and not self.rebuilt

    @property
    def only_prefills(self) -> bool:
        """It ends with its prefill and never steps."""
        return self.limit == self.num_prompt

    @property
    def reads_prefill(self) -> bool:
        """What its prefill finds must be told to the scheduler."""
        return self.only_prefills or self.needs_prompt_logits

    @property
    def written_upper_bound(self) -> int:
        """Most positions whose KV can be written once the prefill and every step in flight have run."""
        return len(self.tokens) - 1 + self.stride * self.steps_in_flight

    @property
    def left_to_prefill(self) -> int:
        """Positions that no prefill was ordered for yet; 0 while waiting."""
        return self.prefill_end - self.prefilled

    @property
    def may_step(self) -> bool:
        """Prefilled, not held, and not certain to end by the steps in flight (each emits at least one token)."""
        prefilled = self.prefilled == self.prefill_end and not self.held
        return prefilled and len(self.tokens) + self.steps_in_flight < self.limit

    def next_chunk(self, count: int) -> PrefillChunk:
        """Order the next ``count`` positions to be prefilled."""
        assert self.slot is not None and 0 < count <= self.left_to_prefill, "no such chunk"
        start, end = self.prefilled, self.prefilled + count
        self.prefilled = end
        return PrefillChunk(
            sequence=self,
            slot=self.slot,
            start=start,
            token_ids=self.tokens[start:end],
            shifted_ids=self.tokens[start + 1 : end + 1],
            is_last=end == self.prefill_end,
        )

    def cut(self, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
        """The part of a step's tokens that the request keeps, and the reason to end with it, if any."""
        left = self.limit - len(self.tokens)
        kept = token_ids[:left]
        reason: FinishReason | None = None if len(token_ids) < left else "length"
        if not self.stop_ids.isdisjoint(kept):
            end = next(index for index, token in enumerate(kept) if token in self.stop_ids)
            kept, reason = kept[: end + 1], "stop"
        if self.constraint is not None:
            count, ended = self.constraint.keep(kept)
            if ended:
                return kept[:count], "stop" if self.constraint.is_complete else "error"
        return kept, reason


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive known tokens whose KV is to be written."""

    sequence: Sequence
    slot: int
    start: int
    """Position of the first token."""
    token_ids: list[int]
    shifted_ids: list[int]
    """The token after each one, always known: what the draft pairs with the target's hidden states."""
    is_last: bool
    """After it: seq_len = known tokens - 1, next_token = the last known one, and the first drafts."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One iteration's work, to be applied in the order of the fields."""

    bind: list[Sequence]
    """Newly admitted or resumed: a slot was assigned, its parameters and state are to be written."""
    pages: list[tuple[int, int, list[int]]]
    """(slot, first block-table index, page ids) to write before anything is launched."""
    rows: list[Sequence]
    """One speculative step over these, by priority and arrival."""
    prefill: list[PrefillChunk]
    """To run after the step."""


@dataclass(slots=True)
class RowResult:
    """What the device says of one row of one launched step.

    Not frozen: that takes four times as long to make, and there is one a row and step.
    """

    sequence: Sequence
    epoch: int
    """``sequence.epoch`` when the step was launched."""
    token_ids: list[int]
    """Emitted: ``num_accepted + 1`` tokens, not yet cut at a stop id or a cap."""
    num_drafts: int
    """Drafts verified in this step for this row: 0 or K."""
    num_accepted: int
    flags: int = 0
    """The guard's verdict (``engine.guard.Flag``); a halting one means that nothing was emitted."""
    logprobs: list[TokenLogprobs] | None = None
    """Of at least the tokens that are kept, where asked for."""


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefilled chunk told, of a sequence that needs its prompt's logits or ends with its prefill."""

    sequence: Sequence
    epoch: int
    """``sequence.epoch`` when the chunk was launched."""
    start: int
    """Position of the chunk's first token."""
    is_last: bool
    flags: int = 0
    """The guard's verdict so far, as in ``RowResult``."""
    logprobs: list[TokenLogprobs] | None = None
    """Of the token after each position of the chunk, where asked for."""

"""Waiting and running requests in their order, and what the running ones hold: a slot each, and pages."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection
from heapq import heappop, heappush

from engine.audit import is_audit
from engine.kv.manager import KvManager
from engine.scheduler_config import SchedulerConfig
from engine.sequence import Sequence


class Queues:
    """Where each live sequence stands. Who is admitted or gives way is for the scheduler to say.

    Args:
        kv: Takes the pages back.
    """

    def __init__(self, config: SchedulerConfig, kv: KvManager) -> None:
        self._config = config
        self._kv = kv
        # Both sorted by ``order``; a live sequence is in one of them.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_waiting(self) -> int:
        """Users' requests among the waiting."""
        return len(self.waiting) - _num_audits(self.waiting)

    @property
    def num_running(self) -> int:
        """Users' requests among the running."""
        return len(self.running) - _num_audits(self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence that holds nothing wait."""
        insort(self.waiting, sequence, key=order_of)

    def bind(self, sequence: Sequence) -> None:
        """A waiting sequence that has got its pages runs: it takes the first free slot."""
        del self.waiting[_place(self.waiting, sequence)]
        insort(self.running, sequence, key=order_of)
        sequence.slot = heappop(self._free_slots)
        sequence.prefill_end = len(sequence.tokens) - 1
        sequence.prefilled = sequence.num_hit_blocks * self._config.page_size

    def vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of its queue. The only place where pages and slots go back."""
        queue = self.waiting if sequence.slot is None else self.running
        del queue[_place(queue, sequence)]
        if sequence.slot is not None:
            heappush(self._free_slots, sequence.slot)
        self._kv.give_back(sequence)
        sequence.slot = None
        sequence.prefill_end = sequence.prefilled = 0
        sequence.steps_in_flight = 0
        sequence.epoch += 1

    def requeue(self, sequence: Sequence) -> None:
        """Let a live sequence wait, whatever it held."""
        self.vacate(sequence)
        self.add(sequence)

    def page_updates(self) -> list[tuple[int, int, list[int]]]:
        """What block tables lack since the last call: (slot, first block-table index, page ids)."""
        updates = []
        for sequence in self.running:
            first = sequence.num_pages_synced
            if first < len(sequence.pages):
                assert sequence.slot is not None, "a running sequence has a slot"
                updates.append((sequence.slot, first, sequence.pages[first:]))
                sequence.num_pages_synced = len(sequence.pages)
        return updates

    def check(self, live: Collection[str]) -> None:
        """Raises ``AssertionError`` unless the requests ``live``, both queues, slots and pages agree."""
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=order_of), "a queue is out of order"
        queued = [sequence.request.request_id for sequence in (*self.waiting, *self.running)]
        assert Counter(queued) == Counter(live), "a live sequence is in no queue, or in two"
        slots = Counter([sequence.slot for sequence in self.running] + list(self._free_slots))
        assert slots == Counter(range(self._config.max_num_seqs)), f"slots are lost or shared: {slots}"
        for sequence in self.waiting:
            assert sequence.slot is None and not sequence.pages, "a waiting sequence holds something"
        for sequence in self.running:
            self._check_running(sequence)
        self._kv.check(self.running)

    def _check_running(self, sequence: Sequence) -> None:
        config = self._config
        ended = len(sequence.tokens) >= sequence.limit and not sequence.only_prefills
        assert not sequence.finished and not ended, "it should have ended"
        if sequence.steps_in_flight:
            start = sequence.written_upper_bound - config.stride
            reach = min(start + config.room, config.max_model_len)
            held = len(sequence.pages) * config.page_size
            assert held >= reach, "a step in flight has no page to write to"


def order_of(sequence: Sequence) -> tuple[int, float, int]:
    """The key of every queue."""
    return sequence.order


def _place(queue: list[Sequence], sequence: Sequence) -> int:
    place = bisect_left(queue, sequence.order, key=order_of)
    assert queue[place] is sequence, "a live sequence is in one queue"
    return place


def _num_audits(queue: list[Sequence]) -> int:
    """One at most is live, and stands behind all others."""
    return int(bool(queue) and is_audit(queue[-1].request.request_id))

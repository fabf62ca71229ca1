"""The lines of the table of ``tests.gpu.show``: what has to hold, its bar, and what the sections measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.gpu.lossless import MARGIN
from tests.gpu.show_sections import Result

VLLM_MTP = {1: 6.55, 8: 6.92, 32: 7.79, 64: 8.97}
SGLANG_MTP = {1: 6.60, 32: 7.01, 64: 10.42}
"""Milliseconds of an MTP step by batch size: vLLM 0.24 and SGLang 0.5.15 (fa3) on one H200, V2-Lite's shape, bf16,
prompts of 512 tokens, 256 new ones, K = 3, three tokens a step; not measured at every size."""
BATCHES = (1, 8, 32, 64)
FIRST_TOKENS = (17, 129, 512)
"""Lengths of prompts, in tokens."""


@dataclass(frozen=True)
class Measured:
    """A figure, and whether it reaches the bar."""

    text: str
    ok: bool | None
    """``None`` where there is no bar."""
    aim: bool | None = None
    """Whether the aim beyond the bar is reached, where there is one."""


@dataclass(frozen=True)
class Line:
    """One thing to show."""

    title: str
    bar: str
    sections: tuple[str, ...]
    """That can measure it; the first that did is taken."""
    find: Callable[[Any], Measured]
    """From a section's data. Raises ``LookupError`` where it has no such figure."""


@dataclass(frozen=True)
class Row:
    """A line, filled in."""

    title: str
    bar: str
    measured: str
    verdict: str
    """ok, missed, told (a figure without a bar) or not run."""


def fill(results: dict[str, Result]) -> list[Row]:
    """Every line, from what was run; nothing is known of the rest but why."""
    return [_fill(line, results) for line in lines()]


def _fill(line: Line, results: dict[str, Result]) -> Row:
    reasons = []
    for name in line.sections:
        result = results.get(name, {"status": "not run"})
        if result["status"] != "done":
            reason = result.get("reason")
            reasons.append(f"{name}: {result['status']}" + (f", {reason}" if reason else ""))
            continue
        try:
            found = line.find(result["data"])
        except LookupError as error:
            reasons.append(f"{name}: {error.args[0] if error.args else 'no such figure'}")
            continue
        verdict = "told" if found.ok is None else "ok" if found.ok else "missed"
        if found.ok and found.aim is not None:
            verdict += ", aim met" if found.aim else ", aim missed"
        return Row(line.title, line.bar, found.text, verdict)
    asked = [reason for reason in reasons if not reason.endswith(": not run")] or reasons[:1]
    return Row(line.title, line.bar, "; ".join(asked), "not run")


def lines() -> Iterator[Line]:
    """In the order of the table."""
    yield Line("tests/gpu", "0 failed", ("suite",), _tests)
    for name, title in (
        ("shipped", "shipped, bf16"),
        ("f2", "F2 shape, bf16"),
        ("shipped-fp32", "shipped, fp32"),
        ("f2-fp32", "F2 shape, fp32"),
    ):
        bar = "no difference" if "fp32" in name else f"none of {MARGIN} nats or more but by a router's tie"
        if name == "f2":
            bar = "no difference of on and off"
        yield Line(f"on = off = solo, {title}", bar, ("lossless", "suite"), _lossless(name))
    yield Line(
        "steady decode, 1 to 20 live", "0 eager", ("steady", "suite"), _property("steady", "test_steady")
    )
    above = _property("above_bucket", "test_steady")
    yield Line("one request above --max-graph-rows", "eager, above_bucket", ("steady", "suite"), above)
    for size in BATCHES:
        yield _mtp_line(size)
    for name in ("concentrated", "spread"):
        yield Line(f"plain step, batch 1, {name}", "-", (f"plain-{name}",), _step(0, 1))
    for size in BATCHES:
        bar = "<= 1.6 x floor (aim 1.4)"
        yield Line(f"MTP step over floor, batch {size}, spread", bar, ("bench-spread",), _ratio(size))
    for name in ("bench-concentrated", "bench-spread"):
        yield Line(f"host gap, {name[6:]}", "< 3 % at every batch", (name,), _host_gap)
    for name in ("bench-concentrated", "bench-spread", "bench-shipped"):
        yield Line(f"eager forwards, {name[6:]}", "0", (name,), _no_eager)
    yield from _shipped_lines()
    for length in FIRST_TOKENS:
        for title, section, k in (
            ("shipped, K = 3", "bench-shipped", 3),
            ("V2-Lite, K = 0", "plain-spread", 0),
        ):
            yield Line(f"first token, {title}, prompt {length}", "-", (section,), _first_token(k, length))
    for name, limit in (("v2-lite", 1.0), ("shipped", 2.0)):
        bar = f"< {limit:g} % of the step"
        yield Line(f"guard and contract, {name}", bar, (f"overhead-{name}",), _overhead(limit))
    for size in (1, 64):
        title = f"V2-Lite, K = 3, batch {size}, all sampling parameters"
        yield Line(title, "-", ("bench-sampled",), _step(3, size, variant="full"))
    injection = _module("test_injection")
    yield Line("injection by phase, kind and row", "0 failed", ("injection", "suite"), injection)
    yield Line(
        "historical fault, fa3 kernel", "0 failed", ("regression", "suite"), _module("test_flashinfer")
    )
    yield Line("historical fault, CPU twin", "0 failed", ("twin",), _tests)
    yield Line("trtllm_mla call against flashinfer", "0 failed", ("trtllm",), _against_flashinfer)
    reached = _property("trtllm_gen", "test_flashinfer", has_bar=False)
    yield Line("trtllm-gen called on this GPU", "-", ("regression", "suite"), reached)


def _shipped_lines() -> Iterator[Line]:
    yield Line("shipped, K = 3, batch 1", "< 1.2 ms (aim 0.6)", ("bench-shipped",), _step(3, 1, 1.2, 0.6))
    yield Line("shipped, K = 0, batch 1", "-", ("bench-shipped",), _step(0, 1))
    sampled = _step(3, 1, variant="full")
    yield Line("shipped, K = 3, batch 1, all sampling parameters", "-", ("bench-shipped",), sampled)
    speedup = _speedup("K = 3", "transformers", 10)
    yield Line("shipped against Transformers, batch 1", ">= 10 x", ("transformers",), speedup)
    yield Line("shipped, K = 3 against K = 0", ">= 1.5 x", ("transformers",), _speedup("K = 3", "K = 0", 1.5))


# --- tests --------------------------------------------------------------------------------------------------


def _told(counts: Counter[str], data: Any) -> Measured:
    text = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped") if counts[name])
    if counts["failed"]:
        text += ": " + ", ".join(data["failures"][:3])
    elif counts["skipped"]:
        text += ": " + "; ".join(reason for reason in list(data["skips"])[:3])
    return Measured(text, not counts["failed"] and counts["passed"] > 0)


def _tests(data: Any) -> Measured:
    total: Counter[str] = Counter()
    for counts in data["modules"].values():
        total.update(counts)
    return _unless_skipped(total, data)


def _unless_skipped(counts: Counter[str], data: Any) -> Measured:
    """Skipped altogether is not run: no figure."""
    if not counts["passed"] and not counts["failed"]:
        raise LookupError("skipped: " + "; ".join(data["skips"] or ["nothing was collected"]))
    return _told(counts, data)


def _against_flashinfer(data: Any) -> Measured:
    """What was skipped for want of the package is what this is about."""
    missing = [reason for reason in data["skips"] if "flashinfer" in reason]
    found = _tests(data)
    if missing and found.ok:
        passed = sum(counts.get("passed", 0) for counts in data["modules"].values())
        raise LookupError(f"{missing[0]}; {passed} others passed")
    return found


def _module(name: str) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        counts = Counter[str](data["modules"].get(name, {}))
        chosen = data | {"failures": [one for one in data["failures"] if one.startswith(f"{name}::")]}
        return _unless_skipped(counts, chosen)

    return find


def _property(prefix: str, module: str, *, has_bar: bool = True) -> Callable[[Any], Measured]:
    """What tests of a module recorded; they record it only once they have checked it, and none may have failed."""

    def find(data: Any) -> Measured:
        texts = {name: text for name, text in data["properties"].items() if name.split()[0] == prefix}
        failed = [one for one in data["failures"] if one.startswith(f"{module}::")]
        if not texts and not failed:
            raise LookupError(f"no test recorded {prefix}")
        told = "; ".join(
            f"{name.removeprefix(prefix).strip()} {text}".strip() for name, text in texts.items()
        )
        return Measured(", ".join([*failed[:3], told]) if failed else told, not failed if has_bar else None)

    return find


def _lossless(name: str) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        texts = {
            key: text for key, text in data["properties"].items() if key.split()[:2] == ["lossless", name]
        }
        failed = [one for one in data["failures"] if "test_graphs_on_equals" in one and f"[{name}-K" in one]
        if not texts and not failed:
            raise LookupError(f"no test recorded lossless {name}")
        told = "; ".join(f"{' '.join(key.split()[2:])}: {text}" for key, text in texts.items())
        return Measured(told or failed[0], not failed)

    return find


# --- benchmarks ---------------------------------------------------------------------------------------------


def _bench(data: Any, k: int, size: int, variant: str = "greedy") -> Any:
    for row in data["rows"]:
        if (row["num_speculative_tokens"], row["batch_size"], row["variant"]) == (k, size, variant):
            return row
    raise LookupError(f"K = {k}, batch {size}, {variant} was not measured")


def _step(
    k: int, size: int, bar: float | None = None, aim: float | None = None, variant: str = "greedy"
) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        row = _bench(data, k, size, variant)
        step = row["step_ms"]
        text = f"{step:.3f} ms, floor {row['floor_ms']:.3f}, {row['tokens_per_second']:.0f} tokens/s"
        return Measured(text, None if bar is None else step < bar, None if aim is None else step < aim)

    return find


def _first_token(k: int, length: int) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        row = next(
            (
                one
                for one in data.get("first_tokens", [])
                if (one["num_speculative_tokens"], one["prompt_tokens"]) == (k, length)
            ),
            None,
        )
        if row is None:
            raise LookupError(f"no first token behind {length}")
        return Measured(
            f"{row['captured_ms']:.2f} ms, eager {row['eager_ms']:.2f} ({row['ratio']:.2f} x)", None
        )

    return find


def _mtp_line(size: int) -> Line:
    title = f"MTP step, batch {size}, concentrated"
    if size == 1:
        return Line(title, "< 4.4 ms (aim 3.0)", ("bench-concentrated",), _step(3, size, 4.4, 3.0))
    peers = {"vLLM": VLLM_MTP.get(size), "SGLang": SGLANG_MTP.get(size)}
    known = {name: value for name, value in peers.items() if value is not None}
    bar = min(known.values())
    told = ", ".join(f"{name} {value:.2f}" for name, value in known.items())
    return Line(title, f"< {bar:.2f} ms ({told})", ("bench-concentrated",), _step(3, size, bar))


def _ratio(size: int) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        row = _bench(data, 3, size)
        text = f"{row['ratio']:.2f} x ({row['step_ms']:.3f} of {row['floor_ms']:.3f} ms)"
        return Measured(text, row["ratio"] <= 1.6, row["ratio"] <= 1.4)

    return find


def _host_gap(data: Any) -> Measured:
    gaps = {row["batch_size"]: row["host_gap"] for row in data["rows"] if row["host_gap"] is not None}
    if not gaps:
        raise LookupError("no host gap was measured")
    told = ", ".join(f"{gap:.2%} at {size}" for size, gap in sorted(gaps.items()))
    return Measured(told, max(gaps.values()) < 0.03)


def _no_eager(data: Any) -> Measured:
    counts = [row["eager_forwards"] for row in data["rows"]]
    steps = sum(row["steps"] for row in data["rows"])
    return Measured(f"{sum(counts)} in {steps} iterations of {len(counts)} windows", not any(counts))


def _speedup(name: str, other: str, bar: float) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        rates = {one["name"]: one["tokens_per_second"] for one in data["results"] if one["batch_size"] == 1}
        missing = [one for one in (name, other) if one not in rates]
        if missing:
            raise LookupError(f"{missing[0]} was not measured")
        ratio = rates[name] / rates[other]
        return Measured(f"{ratio:.2f} x ({rates[name]:.0f}, {rates[other]:.0f} tokens/s)", ratio >= bar)

    return find


def _overhead(limit: float) -> Callable[[Any], Measured]:
    def find(data: Any) -> Measured:
        if not data["overheads"]:
            raise LookupError("no overhead was measured")
        texts = []
        for one in data["overheads"]:
            least, most = min(one["percent"]), max(one["percent"])
            spread = f"{least:+.2f} to {most:+.2f} over {len(one['percent'])} pairs"
            texts.append(f"{one['median_percent']:+.2f} % at {one['batch_size']} ({spread})")
        return Measured("; ".join(texts), all(one["median_percent"] < limit for one in data["overheads"]))

    return find

"""No kernel is compiled while requests wait: what serving launches, starting up has launched before."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine import kernels
from engine.kernels import row_classes

jit = pytest.importorskip("engine.kernels.jit", reason="Triton is not installed")

PER_PROJECTION = {"_skinny_linear", "_rms_norm"}
"""Kernels that have a variant for each shape of a layer's weights, but none for a number of rows."""
FORMS = {
    "_choose_kernel": 8, "_find_parts": 4, "_accept": 5,
    "weigh_kernel": 5, "accept_kernel": 4, "propose_kernel": 4,
}  # fmt: skip
"""Most variants of a kernel over all numbers of rows; of those that are not named: 2."""


def _report(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.launches", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize(
    ("shape", "dtype", "k"), [("small", "bfloat16", 3), ("wide", "bfloat16", 3), ("small", "float32", 0)]
)
def test_no_prefill_and_no_step_meets_a_variant_that_starting_up_did_not(
    shape: str, dtype: str, k: int
) -> None:
    report = _report(shape, dtype, str(k))
    assert report["late"] == {}
    expected = {
        "_write_latent",
        "_choose_kernel",
        "_gate_up_kernel",
        "_accept",
        "weigh_kernel",
        "accept_kernel",
    }
    assert expected <= set(report["warm"])
    many = {name: count for name, count in report["warm"].items() if count > FORMS.get(name, 2)}
    assert set(many) <= PER_PROJECTION, many
    assert sum(report["warm"].values()) <= 60
    teams = {"weigh_kernel": 5, "accept_kernel": 4, "propose_kernel": 4}  # of 32, 16, 8 and 1; one has a mask
    assert shape != "wide" or teams.items() <= report["warm"].items()


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 600])
def test_every_number_of_rows_shares_a_class_with_the_next_one_that_is_warmed(most: int) -> None:
    classes = row_classes(most)
    assert classes[-1] == most and len(classes) <= most.bit_length() + 1
    for rows in range(1, most + 1):
        assert min(one for one in classes if one >= rows) == min(1 << (rows - 1).bit_length(), most)


def test_an_argument_that_varies_is_one_that_there_is() -> None:
    def kernel(rows: object) -> None: ...

    with pytest.raises(AssertionError, match="row_count"):
        jit.jit_varying("row_count")(kernel)


KERNEL_FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))
BEFORE_WAIT = {"prefetch", "_fetch_shared"}
"""What a kernel may do with memory before it waits for the previous one."""


def _decorators(function: ast.FunctionDef) -> set[str]:
    nodes = (node.func if isinstance(node, ast.Call) else node for node in function.decorator_list)
    return {node.id for node in nodes if isinstance(node, ast.Name)}


def _called(node: ast.AST) -> set[str]:
    return {ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}


@pytest.mark.parametrize("file", KERNEL_FILES, ids=lambda file: file.stem)
def test_every_kernel_waits_for_the_previous_one_before_it_touches_memory(file: Path) -> None:
    """And on every path, as a statement of its own outside loops: see ``await_previous``."""
    functions = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        waits = [ast.unparse(statement).startswith("await_previous(") for statement in function.body]
        if not _decorators(function) & {"jit", "jit_varying"}:
            assert not any(waits), f"{function.name} is no kernel, and waits"
            continue
        assert waits.count(True) == 1, f"{function.name} waits {waits.count(True)} times"
        before = set().union(*map(_called, function.body[: waits.index(True)]))
        functions_called = {name for name in before if "." not in name}
        assert functions_called <= BEFORE_WAIT and not before & {"tl.load", "tl.store"}, (
            f"{function.name} calls {before} before it waits"
        )

"""Workflows and documentation: scripts parse, and files, options and targets that they name exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from service.cli import app
from service.commands.bench_gpu import choose_model
from service.settings import Settings, option_name

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = ("operations.md", "runbook.md", "security.md", "trial.md")


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_script_parses(workflow: Path):
    for step in steps(workflow):
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "value", step["run"])
            subprocess.run(["bash", "-n", "-c", script], check=True)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_tokens_can_only_read(workflow: Path):
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v4"))


def test_the_gpu_job_takes_the_torch_of_the_cuda_image():
    text = (ROOT / "Dockerfile").read_text().partition(" AS cuda-build")[2]
    environment = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())["env"]
    [value] = re.findall(r"^ARG TORCH=(\S+)$", text.partition("\nFROM ")[0], flags=re.MULTILINE)
    assert environment["TORCH"] == value


def test_the_gpu_job_measures_with_options_that_the_bench_has():
    # The function of the script, and its arguments as the shell would split them.
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text().replace("\\\n", "")
    runs = [
        shlex.split(line)[2:] for line in re.findall(r"^ +(bench [a-z0-9-]+ --.*)$", text, flags=re.MULTILINE)
    ]
    assert len(runs) == 2
    for module in re.findall(r"python -m (tests\.[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    group = get_command(app).commands["bench"]  # type: ignore[attr-defined]
    for arguments in runs:
        context = group.commands["gpu"].make_context("gpu", arguments)
        preset, routing = context.params["preset"], context.params["routing"]
        assert choose_model(preset, None, routing, None).preset == preset


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_documentation_exist(page: str):
    text = (ROOT / "docs" / page).read_text()
    known = {option_name(name) for name in Settings.model_fields}
    # Only inline code is about our own options; blocks are commands of other tools, too.
    named = set(re.findall(r"`(--[a-z][a-z0-9-]*)", re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)))
    assert named - known - {"--build-arg", "--enable-feature"} == set()


@pytest.mark.parametrize("page", [*PAGES, "architecture.md"])
def test_links_and_paths_in_the_documentation_exist(page: str):
    text = (ROOT / "docs" / page).read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    paths = re.findall(r"`((?:deploy|docs|tests|\.github)/[\w./-]+)`", text)
    for target in [ROOT / "docs" / link for link in links] + [ROOT / path for path in paths]:
        assert target.exists(), target


def test_make_targets_in_the_documentation_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"\bmake ([a-z-]+)`", (ROOT / "docs" / page).read_text())
        assert set(named) <= targets, page


@pytest.mark.parametrize("script", ["install.sh", "image_check.sh"])
def test_shell_scripts_parse(script: str):
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / script)], check=True)

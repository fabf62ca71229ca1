"""The Dockerfile: what hadolint says, and that it copies, installs and runs what is there."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTALL = ROOT / "deploy" / "install.sh"


def hadolint() -> str | None:
    beside = Path(sys.executable).with_name("hadolint")
    return str(beside) if beside.exists() else shutil.which("hadolint")


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed")
def test_hadolint_has_nothing_to_say():
    result = subprocess.run([str(hadolint()), str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def stages() -> dict[str, str]:
    """Text of each stage by its name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", DOCKERFILE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_cpu_target_is_the_default_and_both_run_unprivileged_under_tini():
    assert list(stages())[-1] == "cpu"
    for name in ("cpu", "cuda"):
        text = stages()[name]
        assert "USER 10001:10001" in text
        assert 'ENTRYPOINT ["/usr/bin/tini", "--", "/opt/eyas/bin/eyas"]' in text
        assert "HEALTHCHECK" in text and "org.opencontainers.image.licenses" in text


def test_base_images_are_pinned():
    args = dict(re.findall(r"^ARG (\w+_IMAGE|CUDA_VERSION)=(\S+)$", DOCKERFILE, flags=re.MULTILINE))
    assert re.fullmatch(r"python:3\.1[123]\.\d+-slim-\w+", args["PYTHON_IMAGE"])
    assert re.fullmatch(r"13\.\d+\.\d+", args["CUDA_VERSION"])
    for image in re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE):
        assert "${" in image, f"{image}: its version must be an ARG at the top"


def test_every_copied_path_exists_and_reaches_the_build_context():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert source in kept, f"{source} is not in the build context"


def test_the_only_variables_of_the_service_are_options():
    from service.settings import ENV_PREFIX, Settings

    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields}
    assert set(re.findall(r"\bEYAS_[A-Z_]+", DOCKERFILE)) <= known


def test_the_install_script_parses_and_knows_each_step_that_the_dockerfile_asks_for():
    subprocess.run(["bash", "-n", str(INSTALL)], check=True)
    script = INSTALL.read_text()
    steps = set(re.findall(r"install\.sh (\w+)(?![\w/-])", DOCKERFILE))
    assert steps == {"system", "packages", "kernels", "app", "user"}
    for step in steps:
        assert re.search(rf"^{step}\(\) {{$", script, flags=re.MULTILINE)


def test_the_image_installs_the_locks_that_make_does():
    recipe = (ROOT / "Makefile").read_text().partition("\n$(VENV)/.runtime:")[2].partition("@touch")[0]
    locks = set(re.findall(r"-r (requirements\S*\.lock)", recipe))
    assert {"requirements.lock"} <= locks == set(re.findall(r"requirements[\w-]*\.lock", INSTALL.read_text()))


def test_the_cuda_image_can_build_tritons_launchers_beside_a_read_only_root():
    # Caches under the one directory that can be written, and the compiler and headers that Triton calls.
    for variable in ("HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert re.search(rf"\b{variable}=/tmp(/\w+)?\b", stages()["cuda"]), variable
    [packages] = re.findall(r"^ +cuda\) packages\+=\((.*)\) ;;$", INSTALL.read_text(), flags=re.MULTILINE)
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(packages.split())


def test_an_unknown_step_is_refused_with_the_usage():
    result = subprocess.run([str(INSTALL), "everything"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "install.sh packages" in result.stderr


def test_the_kernel_list_names_functions_of_the_pinned_flashinfer():
    pinned = (ROOT / "deploy" / "requirements-cuda.txt").read_text()
    assert "\nflashinfer-python==0.6.13\nflashinfer-cubin==0.6.13\n" in pinned
    tree = ast.parse((ROOT / "deploy" / "build_kernels.py").read_text())
    assert "0.6.13" in ast.unparse(tree)
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    assert flashinfer.__version__ == "0.6.13"
    from deploy import build_kernels

    assert all(callable(generate) for generate in build_kernels.generators())

"""Bring what depends on other files up to date: ``python -m deploy.helm.render``.

Copies the rules and the dashboard into the chart, and writes ``deploy/k8s/eyas.yaml``, the chart's rendered
defaults. Needs the package helm-python-sdk (Helm's own library).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1]
CHART = DEPLOY / "helm" / "eyas"
RENDERED = DEPLOY / "k8s" / "eyas.yaml"
HEADER = "# The chart's defaults for those without Helm; written by `python -m deploy.helm.render`.\n"


def copied_files() -> dict[Path, Path]:
    """Files of the chart and what they are copies of."""
    rule_files = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["rule_files"]
    sources = [*(DEPLOY / "prometheus" / name for name in rule_files), DEPLOY / "grafana" / "eyas.json"]
    return {CHART / "files" / source.name: source for source in sources}


def render(values: dict[str, Any] | None = None) -> str:
    """The chart's manifests for a release ``eyas`` in namespace ``eyas``, as one YAML text."""
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        manifests = chart.render(values, name="eyas", namespace="eyas")
    parts = [text.strip() for path, text in sorted(manifests.items()) if path.endswith(".yaml")]
    return "\n---\n".join(part.removeprefix("---").strip() for part in parts if part) + "\n"


def main() -> None:
    for target, source in copied_files().items():
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source, target)
    RENDERED.write_text(HEADER + render())


if __name__ == "__main__":
    main()

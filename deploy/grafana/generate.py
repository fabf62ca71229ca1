"""Write the Grafana dashboard ``eyas.json``: ``python -m deploy.grafana.generate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.grafana.panels import AUDIT, FORWARDS, GUARD, LATENCY, LOAD, OVERVIEW, SPECULATION, Panel

TARGET = Path(__file__).with_name("eyas.json")
WIDTH = 24
"""Columns of Grafana's grid."""
HEIGHT = 8
ROWS = (OVERVIEW, SPECULATION, FORWARDS, GUARD, AUDIT, LATENCY, LOAD)

Json = dict[str, Any]


def _panel(panel: Panel, number: int, x: int, y: int) -> Json:
    heat = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + i),
            "expr": query.replace("$filter", 'instance=~"$instance"'),
            "legendFormat": legend or panel.title,
            "datasource": {"type": "prometheus", "uid": "$datasource"},
            **({"format": "heatmap"} if heat else {}),
        }
        for i, (legend, query) in enumerate(panel.queries)
    ]
    custom: Json = {"fillOpacity": 10, "showPoints": "never"}
    if panel.stacked:
        custom = {"fillOpacity": 40, "showPoints": "never", "stacking": {"mode": "normal"}}
    defaults: Json = {"unit": panel.unit, "custom": custom if panel.kind == "timeseries" else {}}
    if panel.maximum is not None:
        defaults |= {"min": 0, "max": panel.maximum}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.kind == "stat" else HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"calculate": False, "yAxis": {"unit": "short"}} if heat else {},
        "targets": targets,
    }


def _panels() -> Iterator[Json]:
    number = y = 0
    for row in ROWS:
        number += 1
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
        }  # fmt: skip
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            number += 1
            made = _panel(panel, number, x, y)
            height = made["gridPos"]["h"]
            yield made
            x += panel.width
        y += height


def _variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> Json:
    """The dashboard as Grafana imports it."""
    return {
        "uid": "eyas",
        "title": "Eyas",
        "tags": ["eyas", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                _variable("model", "label_values(eyas_info, model)"),
                _variable("instance", 'label_values(eyas_info{model=~"$model"}, instance)'),
            ]
        },
        "panels": list(_panels()),
    }


def text() -> str:
    """The content of ``eyas.json``."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())

"""What the operators' own kinds ask of the fields that the chart sets, as JSON schemas.

Written from the operators' API references (Prometheus operator v1, KEDA v1alpha1, Gateway API Inference Extension
v1), since their definitions do not come with Kubernetes. A field that is not named here is refused: a cluster would
drop a misspelt one without a word.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
COUNT: Schema = {"type": "integer", "minimum": 0}
DURATION: Schema = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}


def fields(required: dict[str, Schema], **optional: Schema) -> Schema:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": required | optional,
        "required": list(required),
        "additionalProperties": False,
    }


def many(items: Schema, most: int | None = None) -> Schema:
    """A list with at least one item."""
    return {"type": "array", "items": items, "minItems": 1} | ({"maxItems": most} if most else {})


MATCH_LABELS = fields({"matchLabels": TEXTS})
ENDPOINT = fields(
    {"port": TEXT},
    path=TEXT,
    interval=DURATION,
    authorization=fields({"credentials": fields({"name": TEXT, "key": TEXT})}, type=TEXT),
)
RECORDING = fields(
    {"record": {"type": "string", "pattern": "^[a-z_:][a-z0-9_:]*$"}, "expr": TEXT}, labels=TEXTS
)
ALERTING = fields({"alert": TEXT, "expr": TEXT}, labels=TEXTS, annotations=TEXTS, **{"for": DURATION})
TRIGGER = fields(
    {
        "type": {"const": "prometheus"},
        # KEDA reads numbers from texts.
        "metadata": fields(
            {"serverAddress": TEXT, "query": TEXT, "threshold": {"type": "string", "pattern": "^[0-9.]+$"}}
        ),
    },
    metricType={"enum": ["AverageValue", "Value"]},
)

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): fields(
        {"selector": MATCH_LABELS, "podMetricsEndpoints": many(ENDPOINT)}, jobLabel=TEXT
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): fields(
        {"groups": many(fields({"name": TEXT, "rules": many({"oneOf": [RECORDING, ALERTING]})}, interval=DURATION))}
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): fields(
        {"scaleTargetRef": fields({"name": TEXT}, apiVersion=TEXT, kind=TEXT), "triggers": many(TRIGGER)},
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        cooldownPeriod=COUNT,
        pollingInterval=COUNT,
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): fields(
        {
            "selector": MATCH_LABELS,
            "targetPorts": many(fields({"number": PORT}), 8),
            # The port may be left out only where the picker is not a Service.
            "endpointPickerRef": fields(
                {"name": TEXT, "port": fields({"number": PORT})}, failureMode={"enum": ["FailOpen", "FailClose"]}
            ),
        }
    ),
}  # fmt: skip
"""Schema of ``spec`` by apiVersion and kind."""

"""The rules of Grafana's kind "dashboard" for the fields that the shipped dashboard uses, as a JSON schema.

Written after kinds/dashboard/dashboard_kind.cue of grafana/grafana, whose definitions are closed: a field that a panel
does not know is an error. What a schema cannot say, such as panels that overlap, `problems` adds.
"""

import re
from collections import Counter
from itertools import combinations
from typing import Any

import jsonschema


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None, *, closed: bool = True) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {
        "type": "object", "properties": properties, "required": [*required], "additionalProperties": not closed,
    }  # fmt: skip


TEXT = {"type": "string", "minLength": 1}
NUMBER = {"type": "number"}
SOURCE = _object({"type": {"const": "prometheus"}, "uid": TEXT})
PLACE = _object(
    {
        "h": {"type": "integer", "minimum": 1},
        "w": {"type": "integer", "minimum": 1, "maximum": 24},
        "x": {"type": "integer", "minimum": 0, "maximum": 23},
        "y": {"type": "integer", "minimum": 0},
    }
)
# The units are among those of Grafana's list of formats.
UNITS = {"enum": ["short", "s", "bytes", "percentunit", "reqps", "ops"]}
FIELDS = _object({"unit": UNITS}, {"min": NUMBER, "max": NUMBER, "decimals": NUMBER})
TARGET = _object(
    {"refId": {"type": "string", "pattern": "^[A-Z]$"}, "datasource": SOURCE, "expr": TEXT}, {"legendFormat": TEXT}
)
PANEL = _object(
    {
        "id": {"type": "integer", "minimum": 1},
        "type": {"const": "timeseries"},
        "title": TEXT,
        "datasource": SOURCE,
        "gridPos": PLACE,
        "fieldConfig": _object({"defaults": FIELDS, "overrides": {"type": "array"}}),
        "targets": {"type": "array", "items": TARGET, "minItems": 1},
    },
    {"description": TEXT},
)
NAME = {"type": "string", "pattern": r"^\w+$"}
CHOSEN = _object({"text": {"type": "array", "items": TEXT}, "value": {"type": "array", "items": TEXT}})
OF_SOURCES = _object({"name": NAME, "type": {"const": "datasource"}, "query": {"const": "prometheus"}}, {"label": TEXT})
OF_LABELS = _object(
    {"name": NAME, "type": {"const": "query"}, "datasource": SOURCE, "query": TEXT, "refresh": {"enum": [0, 1, 2]}},
    {"label": TEXT, "multi": {"const": True}, "includeAll": {"const": True}, "current": CHOSEN},
)
SCHEMA = _object(
    {
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{8,40}$"},
        "title": TEXT,
        "schemaVersion": {"type": "integer", "minimum": 36, "maximum": 41},
        "panels": {"type": "array", "items": PANEL, "minItems": 1},
        "templating": _object({"list": {"type": "array", "items": {"oneOf": [OF_SOURCES, OF_LABELS]}}}),
        "time": _object({"from": {"type": "string", "pattern": r"^now-\d+[smhd]$"}, "to": {"const": "now"}}),
        "refresh": {"type": "string", "pattern": r"^\d+[smhd]$"},
    },
    {"tags": {"type": "array", "items": TEXT}, "version": {"type": "integer"}, "editable": {"type": "boolean"}},
)
BUILT_IN = {"__rate_interval", "__interval", "__range", "__all"}


def problems(board: dict[str, Any]) -> list[str]:
    """Return each reason why Grafana would refuse a dashboard, or show it wrongly."""
    found = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(board)
    ]
    if found:
        return found
    panels, variables = board["panels"], [variable["name"] for variable in board["templating"]["list"]]
    for what, values in (
        ("id of panels", [panel["id"] for panel in panels]),
        ("title", [panel["title"] for panel in panels]),
        ("variable", variables),
        *((f"refId of {panel['title']}", [target["refId"] for target in panel["targets"]]) for panel in panels),
    ):
        found += [f"{what}: {value} occurs {count} times" for value, count in Counter(values).items() if count > 1]
    for panel in panels:
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            found.append(f"{panel['title']} ends beyond column 24")
    for one, other in combinations(panels, 2):
        a, b = one["gridPos"], other["gridPos"]
        if all(a[start] < b[start] + b[size] and b[start] < a[start] + a[size] for start, size in ("xw", "yh")):
            found.append(f"{one['title']} and {other['title']} overlap")
    used = set(re.findall(r"\$\{?(\w+)", repr(board)))
    found += [f"${name} is no variable" for name in sorted(used - BUILT_IN - set(variables))]
    found += [f"${name} is never used" for name in variables if name not in used]
    return found

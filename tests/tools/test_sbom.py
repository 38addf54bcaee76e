"""Tests of the bill of materials: it has every pin with its digests, in the format of CycloneDX 1.6."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.paths import ROOT
from tools import lock, sbom

# The parts of CycloneDX's bom-1.6.schema.json that the bill uses. The original also refuses unknown keys.
HASH = {
    "type": "object",
    "required": ["alg", "content"],
    "additionalProperties": False,
    "properties": {"alg": {"const": "SHA-256"}, "content": {"type": "string", "pattern": "^[a-fA-F0-9]{64}$"}},
}
COMPONENT: dict[str, Any] = {
    "type": "object",
    "required": ["type", "name"],
    "additionalProperties": False,
    "properties": {
        "type": {"enum": ["application", "library"]},
        "bom-ref": {"type": "string", "minLength": 1},
        "name": {"type": "string"},
        "version": {"type": "string", "maxLength": 1024},
        "purl": {"type": "string", "pattern": r"^pkg:pypi/[a-z0-9.-]+@[0-9][^@]*$"},
        "externalReferences": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["url", "type"],
                "additionalProperties": False,
                "properties": {
                    "url": {"type": "string", "format": "iri-reference"},
                    "type": {"enum": ["distribution"]},
                    "hashes": {"type": "array", "items": HASH},
                },
            },
        },
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["bomFormat", "specVersion"],
    "additionalProperties": False,
    "properties": {
        "$schema": {"enum": ["http://cyclonedx.org/schema/bom-1.6.schema.json"]},
        "bomFormat": {"enum": ["CycloneDX"]},
        "specVersion": {"const": "1.6"},
        "serialNumber": {
            "type": "string",
            "pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
        },
        "version": {"type": "integer", "minimum": 1},
        "metadata": {"type": "object", "additionalProperties": False, "properties": {"component": COMPONENT}},
        "components": {"type": "array", "uniqueItems": True, "items": COMPONENT},
        "dependencies": {
            "type": "array",
            "uniqueItems": True,
            "items": {
                "type": "object",
                "required": ["ref"],
                "additionalProperties": False,
                "properties": {
                    "ref": {"type": "string"},
                    "dependsOn": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
                },
            },
        },
    },
}


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    return sbom.bill(lock.CONSTRAINTS.read_text(), lock.LOCK.read_text())


def test_the_bill_is_valid(bill: dict[str, Any]) -> None:
    jsonschema.validate(bill, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**bill, "specVersion": 1.6}, SCHEMA)
    references = [entry["bom-ref"] for entry in bill["components"]]
    assert bill["dependencies"][0]["dependsOn"] == references and len(set(references)) == len(references)


def test_the_bill_has_every_pin_and_every_digest(bill: dict[str, Any]) -> None:
    text = lock.LOCK.read_text()
    versions = {entry["name"]: entry["version"] for entry in bill["components"]}
    assert versions == lock.pins(lock.CONSTRAINTS.read_text())
    digests = [
        one["hashes"][0]["content"] for entry in bill["components"] for one in entry.get("externalReferences", [])
    ]
    assert len(digests) == text.count("--hash=sha256:") and all(f"sha256:{digest}" in text for digest in digests)
    bare = {entry["name"] for entry in bill["components"] if "externalReferences" not in entry}
    assert bare == lock.NOT_LOCKED


def test_the_file_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-m", "tools.sbom", str(tmp_path / name)], check=True, cwd=ROOT)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    jsonschema.validate(json.loads((tmp_path / "one").read_text()), SCHEMA)

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
def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": [*required], "additionalProperties": False, "properties": properties}


def a_list(items: dict[str, Any], *, unique: bool = False) -> dict[str, Any]:
    return {"type": "array", "uniqueItems": unique, "items": items}


TEXT = {"type": "string"}
HASH = an_object("alg", "content", alg={"const": "SHA-256"}, content={**TEXT, "pattern": "^[a-fA-F0-9]{64}$"})
REFERENCE = an_object(
    "url", "type", url={**TEXT, "format": "iri-reference"}, type={"enum": ["distribution"]}, hashes=a_list(HASH)
)
COMPONENT = an_object(
    "type", "name", type={"enum": ["application", "library"]}, name=TEXT, version={**TEXT, "maxLength": 1024},
    purl={**TEXT, "pattern": r"^pkg:pypi/[a-z0-9.-]+@[0-9][^@]*$"}, externalReferences=a_list(REFERENCE),
    **{"bom-ref": {**TEXT, "minLength": 1}},
)  # fmt: skip
SCHEMA = an_object(
    "bomFormat", "specVersion", bomFormat={"enum": ["CycloneDX"]}, specVersion={"const": "1.6"},
    serialNumber={**TEXT, "pattern": "^urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"},
    version={"type": "integer", "minimum": 1}, metadata=an_object(component=COMPONENT),
    components=a_list(COMPONENT, unique=True),
    dependencies=a_list(an_object("ref", ref=TEXT, dependsOn=a_list(TEXT, unique=True)), unique=True),
    **{"$schema": {"enum": ["http://cyclonedx.org/schema/bom-1.6.schema.json"]}},
)  # fmt: skip


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

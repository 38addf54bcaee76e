"""Writer of sbom.json: the locked packages as a CycloneDX 1.6 bill of materials.

    python -m tools.sbom OUT        (make sbom writes build-cache/sbom.json)

The packages are those of requirements-lock.txt with their digests, and those of constraints.txt that are not locked,
without digests. Equal files give equal bytes, since the bill has neither a date nor a random number.
"""

from __future__ import annotations

import argparse
import json
import re
import uuid
from pathlib import Path
from typing import Any

from kvexport.version import __version__
from tools.lock import CONSTRAINTS, LOCK, pins


def digests(lock: str) -> dict[str, list[str]]:
    blocks = re.findall(r"^([\w.-]+)==[^\s\\]+((?: \\\n    --hash=sha256:[0-9a-f]{64})*)", lock, re.MULTILINE)
    return {name: re.findall(r"sha256:([0-9a-f]{64})", hashes) for name, hashes in blocks}


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    """Return a package as a component.

    Each digest belongs to one wheel, so the wheels are its external references.
    """
    reference = f"pkg:pypi/{name}@{version}"
    entry: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": version,
        "purl": reference,
    }
    if hashes:
        entry["externalReferences"] = [
            {"type": "distribution", "url": reference, "hashes": [{"alg": "SHA-256", "content": digest}]}
            for digest in hashes
        ]
    return entry


def bill(constraints: str, lock: str) -> dict[str, Any]:
    """Return the bill of materials of the pins in `constraints`, with the digests in `lock`."""
    hashes = digests(lock)
    components = [component(name, version, hashes.get(name, [])) for name, version in sorted(pins(constraints).items())]
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([__version__, components]))
    root = f"pkg:pypi/kvexport@{__version__}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": "kvexport",
                "version": __version__,
                "purl": root,
            }
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": [entry["bom-ref"] for entry in components]}],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill(CONSTRAINTS.read_text(), LOCK.read_text()), indent=1) + "\n")


if __name__ == "__main__":
    main()

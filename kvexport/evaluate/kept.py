"""What an evaluation keeps in its folder (`--work`), so that a run that was killed goes on: results, each a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from kvexport.errors import UsageError
from kvexport.evaluate.files import digest_of, write_whole
from kvexport.evaluate.result import Result


def read_result(path: Path, key: str) -> Result | None:
    """The result that was kept there under the key; None where there is none, or one that was measured otherwise.
    Raises UsageError for a damaged file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["sha256"] == digest_of(content["key"], content["result"])
        result = TypeAdapter(Result).validate_python(content["result"]) if whole else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UsageError(f"{path} is not what was written there", f"rm {path}, and it is measured again")
    return result if content["key"] == key else None


def write_result(path: Path, key: str, result: Result) -> None:
    """Keep a result under the digest of all that it depends on."""
    found = json.loads(json.dumps(asdict(result)))  # tuples become lists, as a reader will see them
    write_whole(path, json.dumps({"key": key, "sha256": digest_of(key, found), "result": found}, indent=1))

"""Result files in the folder of an evaluation (`--work`), so that a killed run can continue."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from kvexport.errors import UsageError
from kvexport.evaluate.result import Result
from kvexport.files import json_digest, write_file


def read_result(path: Path, key: str) -> Result | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = content["sha256"] == json_digest([content["key"], content["result"]])
        result = TypeAdapter(Result).validate_python(content["result"]) if whole else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UsageError(
            f"{path} is damaged: its digest does not match",
            f"rm {shlex.quote(str(path))}, and the setting is measured again",
        )
    return result if content["key"] == key else None


def write_result(path: Path, key: str, result: Result) -> None:
    values = json.loads(json.dumps(asdict(result)))  # tuples become lists, as in the file
    write_file(path, json.dumps({"key": key, "sha256": json_digest([key, values]), "result": values}, indent=1))

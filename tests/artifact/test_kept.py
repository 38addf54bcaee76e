"""A test with an artifact that an earlier kvexport built: this one runs it, with the tokens that it had then."""

import json
from pathlib import Path

import kvexport
from kvexport.schema.state import CONTRACT_VERSION
from tests.support.tiny_model import generated

KEPT = Path(__file__).parent / "kept"


def test_an_artifact_of_this_contract_that_an_earlier_version_built_gives_the_same_tokens() -> None:
    """After a change of the contract's version, build the tiny artifact again, under the name of the new version."""
    engine = kvexport.load(KEPT / f"contract-{CONTRACT_VERSION}", threads=1)
    assert generated(engine) == json.loads((KEPT / "answers.json").read_text())

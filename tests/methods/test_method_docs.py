"""docs/reference/methods.md has a rule for every method and a name for every parameter."""

import re

from kvexport.methods import all_methods
from tests.support.paths import ROOT

DOCS = (ROOT / "docs" / "reference" / "methods.md").read_text(encoding="utf-8")


def test_every_method_that_compresses_has_its_rule_and_every_parameter_its_name() -> None:
    sections = dict(re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", DOCS, re.MULTILINE | re.DOTALL))
    assert set(sections) == {name for name, method in all_methods().items() if method.compresses}
    for name, method in all_methods().items():
        shared = {"selector", "share_pairs"}
        missing = [p for p in method.model_fields if p not in shared and f"`{p}" not in sections.get(name, "")]
        assert not missing, f"{name}: {', '.join(missing)}"
    assert all(f"`{p}" in DOCS for p in ("selector", "share_pairs"))

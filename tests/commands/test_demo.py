"""The demo's story is in the tiny model's language, and both engines answer from it."""

from __future__ import annotations

from pathlib import Path

from kvexport.commands import demo
from kvexport.recipe.inherit import recipe_folder
from kvexport.runtime.text import Tokenizer


def test_the_story_is_long_and_known_to_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_folder(recipe_folder() / "checkpoints" / "tiny")
    text = demo.story()
    ids = tokenizer.encode(text)
    assert len(ids) > 15 * 64 and tokenizer.token_id("<unk>") not in ids
    words = text.split()
    for name, thing in demo.FACTS.items():
        at = [i for i in range(len(words) - 1) if words[i : i + 2] == [name, thing]]
        assert len(at) == 1 and at[0] < len(words) // 2 + 20


def test_the_demo_runs_to_its_end(tmp_path: Path, capsys) -> None:
    assert demo.main(["--out", str(tmp_path / "demo")]) == 0
    shown = capsys.readouterr().out
    assert "passed" in shown and "full cache" in shown
    rows = [line.split() for line in shown.splitlines() if line.startswith(("KeepKV ", "full cache "))]
    right = {row[0]: int(next(word for word in row if word.isdigit())) for row in rows}
    assert right["full"] == len(demo.FACTS) and right["KeepKV"] >= len(demo.FACTS) - 1
    assert "<svg" in (tmp_path / "demo" / "report.html").read_text()

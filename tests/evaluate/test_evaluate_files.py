"""Tests of eval's files: each is complete or absent, and the error about a full disk names the file."""

from pathlib import Path

import pytest

from kvexport.commands.errors import report
from kvexport.errors import UsageError
from kvexport.evaluate.result import Result, Score, read_result, write_result
from kvexport.evaluate.statistics import mean
from tests.support.disks import full_disk

RESULT = Result("keepkv", 0.125, 16, 1000, {"text": Score("text", kl=mean([0.1, 0.3]), samples={"kl": (0.1, 0.3)})})


def test_a_result_is_read_only_under_its_own_key(tmp_path: Path) -> None:
    path = tmp_path / "keepkv.json"
    assert read_result(path, "key") is None
    write_result(path, "key", RESULT)
    assert read_result(path, "key") == RESULT
    assert read_result(path, "another") is None
    assert [p.name for p in tmp_path.iterdir()] == ["keepkv.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"key": 1}', '{"key": "key", "sha256": "", "result": {}}'])
def test_a_file_that_is_no_result_is_named_with_its_fix(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keepkv.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"keepkv.json is damaged: its digest does not match\n  fix: rm .*keepkv.json"):
        read_result(path, "key")


def test_a_full_disk_leaves_the_older_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keepkv.json"
    write_result(path, "key", RESULT)
    with full_disk(), pytest.raises(OSError, match="No space left") as caught:
        write_result(path, "other", RESULT)
    assert report(caught.value) == 3
    assert f"disk full while writing {path}: No space left" in capsys.readouterr().err
    assert read_result(path, "key") == RESULT
    assert list(tmp_path.iterdir()) == [path]

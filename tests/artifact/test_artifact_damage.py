"""Any change of an artifact's files is found before a file is opened."""

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.artifact.reading import load_checked
from kvexport.errors import ArtifactError, KvexportError, UsageError
from tests.support.artifacts import assert_whole, beside, build, rewrite

# Damage.


def test_a_changed_byte_anywhere_is_detected(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    for path in [path for path in target.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for position, byte in enumerate(good):
            bad = bytearray(good)
            bad[position] = byte ^ (0x01, 0x20)[position % 2]  # every other letter changes its case
            path.write_bytes(bad)
            with pytest.raises(ArtifactError) as caught:
                load_checked(target)
            assert path.name in caught.value.problem or path.name == "manifest.json"
            assert "build" in caught.value.fix
        path.write_bytes(good)
    load_checked(target)


@pytest.mark.parametrize("verify", [True, False])
def test_truncated_extended_missing_and_extra_files_are_detected(tmp_path: Path, verify: bool) -> None:
    target = build(tmp_path / "out")
    for path in [path for path in target.rglob("*") if path.is_file()]:
        good = path.read_bytes()
        for bad in (b"", good[:-2], good + b"a", None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            with pytest.raises(ArtifactError, match=path.name):
                load_checked(target, verify=verify)
            path.write_bytes(good)
    for extra in (target / "decoder.onnx.data", target / "weights" / "b.bin", target / "new" / "file"):
        extra.parent.mkdir(exist_ok=True)
        extra.write_text("a")
        with pytest.raises(ArtifactError, match=f"{extra.name}.*not listed"):
            load_checked(target, verify=verify)
        extra.unlink()
    load_checked(target, verify=verify)


def test_verify_false_reads_no_file_but_the_manifest(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    (target / "decoder.onnx").write_text("FIRST decoder")
    assert load_checked(target, verify=False)["label"] == "first"


@pytest.mark.parametrize("name", [
    "../outside", "/etc/hostname", "weights/../../outside", "./decoder.onnx", "weights//a.bin", "a\\b", "C:x", "", ".",
    "a/", "a\0b", "manifest.json",
])  # fmt: skip
def test_a_name_that_could_leave_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    target = build(tmp_path / "out")
    (tmp_path / "outside").write_text("secret")
    entry = {"sha256": hashlib.sha256(b"secret").hexdigest(), "bytes": 6}
    rewrite(target, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(ArtifactError, match=r"manifest\.json lists"):
        load_checked(target)


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    target = build(tmp_path / "out")
    for name in ("decoder.onnx", "weights", "manifest.json"):
        (target / name).rename(tmp_path / name)
        (target / name).symlink_to(tmp_path / name)
        with pytest.raises(ArtifactError, match="symbolic link"):
            load_checked(target)
        (target / name).unlink()
        (tmp_path / name).rename(target / name)
    for name in ("pipe", "manifest.json"):
        (target / name).unlink(missing_ok=True)
        os.mkfifo(target / name)
        with pytest.raises(ArtifactError, match="not an ordinary file"):
            load_checked(target)
        (target / name).unlink()


def test_an_artifact_may_be_named_by_a_link(tmp_path: Path) -> None:
    build(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    assert assert_whole(tmp_path / "current") == "first"


@pytest.mark.parametrize("change", [
    {"format": "other"}, {"contract_version": 999}, {"contract_version": True}, {"contract_version": "1"},
    {"files": []}, {"files": {"decoder.onnx": None}}, {"files": {"decoder.onnx": {"sha256": "0" * 64, "bytes": -1}}},
    {"files": {"decoder.onnx": {"sha256": "0" * 63, "bytes": 13}}},
    {"files": {"decoder.onnx": {"sha256": ["0" * 64], "bytes": 13}}},
    {"files": {"decoder.onnx": {"sha256": "0" * 64, "bytes": 13.0}}},
])  # fmt: skip
def test_a_manifest_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    target = build(tmp_path / "out")
    rewrite(target, lambda manifest: manifest.update(change))
    with pytest.raises(ArtifactError):
        load_checked(target)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a": NaN}',
        b"1" * 1_000_000,
        b" " * (17 << 20),
    ],
    ids=["empty", "utf8", "null", "list", "object", "nested-lists", "nested-objects", "nan", "digits", "huge"],
)
def test_hostile_manifests_end_in_an_artifact_error_at_once(tmp_path: Path, raw: bytes) -> None:
    target = build(tmp_path / "out")
    (target / "manifest.json").write_bytes(raw)
    started = time.monotonic()
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_checked(target)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "content, why", [({"big": "a" * (16 << 20)}, "larger than"), ({"long": 10**60}, "61 digits")], ids=["large", "long"]
)
def test_limits_hold_even_where_the_digest_is_right(tmp_path: Path, content: dict[str, Any], why: str) -> None:
    target = build(tmp_path / "out")
    rewrite(target, lambda manifest: manifest.update(content))
    with pytest.raises(ArtifactError, match=why):
        load_checked(target)


def test_a_manifest_no_reader_would_accept_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(KvexportError, match="more than"), staging(tmp_path / "out") as work:
        write_manifest(work, {"big": "a" * (16 << 20)})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_path_is_a_usage_error_and_an_empty_folder_an_artifact_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("absent", "absent/below", "file", "file/below", "dangling"):
        with pytest.raises(UsageError) as caught:
            load_checked(tmp_path / name)
        assert "kvexport list" in caught.value.fix
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        load_checked(tmp_path / "empty")
    assert beside(tmp_path / "x") == ["dangling", "empty", "file"]

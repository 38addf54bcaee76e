"""Builds that fail, are killed, or find the disk full leave the old artifact, the new one, or nothing."""

import errno
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.errors import EnvironmentProblem, UsageError
from tests.support.artifacts import NAMESPACE, PYTHON_PATH, Forks, assert_whole, beside, build

# Interruptions.


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failed_build_leaves_the_old_artifact_and_nothing_else(tmp_path: Path, raised: type[BaseException]) -> None:
    for target in (build(tmp_path / "out", "old"), tmp_path / "fresh"):
        with pytest.raises(raised), staging(target) as work:
            (work / "half").write_text("half")
            write_manifest(work, {"label": "new"})
            raise raised
    assert assert_whole(tmp_path / "out") == "old"
    assert beside(tmp_path / "out") == ["out"]


def after_kill(target: Path, labels: set[str], load_first: bool) -> None:
    """Check the state after a kill: a complete artifact or none, and the next build removes the remains."""
    absent_allowed = "absent" in labels
    if not load_first:
        with pytest.raises(ZeroDivisionError), staging(target):
            raise ZeroDivisionError
        assert beside(target) in ([[], [target.name]] if absent_allowed else [[target.name]])
    try:
        assert re.sub(r"\d+$", "", assert_whole(target)) in labels
    except UsageError:
        assert absent_allowed
    build(target, "old")
    assert assert_whole(target) == "old"
    assert beside(target) == [target.name]


@pytest.mark.parametrize("no_exchange", [False, True])
@pytest.mark.parametrize("replaces", [False, True])
def test_kill_before_every_file_operation(tmp_path: Path, forks: Forks, replaces: bool, no_exchange: bool) -> None:
    target = tmp_path / "out"
    if replaces:
        build(target, "old")
    for die_at in itertools.count(1):
        if not replaces and target.exists():
            shutil.rmtree(target)
        forks.start(target, label="new", builds=1, die_at=die_at, no_exchange=no_exchange)
        status = forks.wait()
        absent = {"absent"} if no_exchange or not replaces else set()
        after_kill(target, absent | {"new"} | ({"old"} if replaces else set()), load_first=bool(die_at % 2))
        if status != signal.SIGKILL:
            break
    assert status == 0
    assert die_at > 25


@pytest.mark.parametrize("no_exchange", [False, True])
def test_kill_at_any_time(tmp_path: Path, forks: Forks, no_exchange: bool) -> None:
    target = tmp_path / "out"
    for turn in range(24):
        pid = forks.start(target, label="new", builds=1000, pause=0.0005, no_exchange=no_exchange)
        time.sleep(0.0013 * turn)
        os.kill(pid, signal.SIGKILL)
        assert forks.wait() == signal.SIGKILL
        absent = {"absent"} if no_exchange or not turn else set()
        after_kill(target, absent | {"new"} | ({"old"} if turn else set()), load_first=bool(turn % 2))


# Full disks.


def write_to_full_device(work: Path) -> None:
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"a")


def write_without_name(work: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def exceed_quota(work: Path) -> None:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(work / "big.bin"))


def fail_in_another_language(work: Path) -> None:
    raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def fail_behind_another_error(work: Path) -> None:
    try:
        write_without_name(work)
    except OSError as error:
        raise RuntimeError("the export failed") from error


@pytest.mark.parametrize(
    "fail",
    [write_to_full_device, write_without_name, exceed_quota, fail_in_another_language, fail_behind_another_error],
)
def test_full_disk_is_an_environment_problem_with_the_file_and_the_room_left(
    tmp_path: Path, fail: Callable[[Path], None]
) -> None:
    target = build(tmp_path / "out", "old")
    with (
        pytest.raises(
            EnvironmentProblem, match=r"^disk (full|quota used up) while writing big\.bin: \d+ bytes free"
        ) as caught,
        staging(target) as work,
    ):
        (work / "big.bin").write_text("a")
        fail(work)
    assert "--out" in caught.value.fix
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


def test_a_full_disk_that_fsync_reports_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    target = build(tmp_path / "out", "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="disk full while writing"):
        build(target, "new")
    assert assert_whole(target) == "old"
    assert beside(target) == ["out"]


def namespaces_allowed() -> bool:
    try:
        return (
            subprocess.run([*NAMESPACE, "mount -t tmpfs none /mnt"], capture_output=True, check=False).returncode == 0
        )
    except FileNotFoundError:
        return False


MOUNTED = """
import sys
from pathlib import Path
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.publish import staging
from kvexport.artifact.reading import load_checked
from kvexport.errors import EnvironmentProblem, UsageError

root = Path(sys.argv[1])
for size in (1000, 3 << 20):
    try:
        with staging(root / "out") as work:
            (work / "big.bin").write_bytes(bytes(size))
            write_manifest(work, {})
    except EnvironmentProblem as error:
        print(error.problem)
assert load_checked(root / "out")["files"]["big.bin"]["bytes"] == 1000
try:
    with staging(root / "bound") as work:
        pass
except UsageError as error:
    print(error.problem)
print(sorted(path.name for path in root.iterdir()))
"""


# Collected only if processes may mount. The tests above cover the same code with the kernel's own ENOSPC, from
# /dev/full.
if namespaces_allowed():

    def test_on_a_disk_of_one_mebibyte_and_a_bind_mount(tmp_path: Path) -> None:
        script = 'mount -t tmpfs -o size=1m none "$0"; mkdir "$0/bound"; mount --bind "$0/bound" "$0/bound"; '
        script += '"$1" -c "$2" "$0"'
        done = subprocess.run(
            [*NAMESPACE, script, str(tmp_path), sys.executable, MOUNTED],
            capture_output=True,
            text=True,
            check=False,
            env=PYTHON_PATH,
        )
        assert done.returncode == 0, done.stderr
        full, mount, names = done.stdout.splitlines()
        assert re.match(r"disk full while writing big\.bin: \d+ bytes free", full)
        assert "bound is a mount point" in mount
        assert names == "['bound', 'out']"

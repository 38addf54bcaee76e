"""Nothing leaves the machine: a preloaded library records what commands look up, connect to and create."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from kvexport.outbound import QUIET, SWITCH
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="not reached: recording takes Linux and a C compiler"
)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("recorder") / "recorder.so"
    source = ROOT / "tests" / "support" / "tracer.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


class Home:
    """A home folder of its own, and the record of the commands that ran with it."""

    def __init__(self, folder: Path, recorder: Path) -> None:
        self.folder, self.trace = folder / "home", folder / "trace"
        self.temporary = folder / "temporary"
        self.folder.mkdir()
        self.temporary.mkdir()
        own = {*QUIET, SWITCH, "TORCHINDUCTOR_CACHE_DIR"}  # torch sets the last one in the process of the tests
        # Under any of these ONNX Runtime reports nothing, so the tests would pass there whatever kvexport does.
        own |= {"CI", "TF_BUILD", "GITHUB_ACTIONS", "GITLAB_CI", "CIRCLECI", "TRAVIS", "JENKINS_URL"}
        inherited = {k: v for k, v in os.environ.items() if k not in own and not k.startswith("XDG_")}
        self.environment = {
            **inherited, "HOME": str(self.folder), "TMPDIR": str(self.temporary), "LD_PRELOAD": str(recorder),
            "TRACE": str(self.trace), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "kvexport", *map(str, arguments)]

    def run(self, *arguments: object, **variables: str) -> None:
        ran = subprocess.run(
            self.command(*arguments),
            env={**self.environment, **variables},
            cwd=self.temporary,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr

    def recorded(self) -> list[tuple[str, str]]:
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        return [(kind, what) for kind, _, what in (line.partition(" ") for line in lines)]

    def outside(self) -> list[str]:
        """Return what was looked up or connected to, and what was created outside of the documented folders."""
        folders = (self.folder / ".cache" / "kvexport", self.temporary)
        outbound = [f"{kind} {what}" for kind, what in self.recorded() if kind != "create"]
        created = {self.temporary / what for kind, what in self.recorded() if kind == "create"}
        for path in sorted(created):
            inside = any(path == x or x in path.parents or path in x.parents for x in folders)
            if not inside and not str(path).startswith(("/dev/", "/proc/")):
                outbound.append(f"create {path}")
        return outbound + [str(x) for x in self.folder.rglob("*") if x.is_file() and folders[0] not in x.parents]


@pytest.fixture
def home(tmp_path: Path, recorder: Path) -> Home:
    return Home(tmp_path, recorder)


def test_the_recorder_sees_a_look_up_a_connection_and_a_file(home: Home) -> None:
    code = "import socket as s; open('here', 'w'); s.getaddrinfo('localhost', 80); s.socket().connect(('127.0.0.1', 9))"
    subprocess.run([sys.executable, "-c", code], env=home.environment, cwd=home.temporary, capture_output=True)
    assert {("create", "here"), ("lookup", "localhost"), ("connect", "127.0.0.1")} <= {*home.recorded()}


def test_generate_sends_nothing_and_writes_nothing_elsewhere(home: Home, tiny_artifact: Path) -> None:
    home.run("generate", tiny_artifact, "ab", "--max-new-tokens", 4)
    assert home.outside() == []


def test_with_the_switch_onnxruntime_reports_as_it_likes(home: Home, tiny_artifact: Path) -> None:
    import onnxruntime

    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 29):
        pytest.skip(f"not reached: onnxruntime {onnxruntime.__version__} has no reports")
    home.run("generate", tiny_artifact, "ab", "--max-new-tokens", 4, **{SWITCH: "1"})
    assert any("Microsoft" in line for line in home.outside())


def test_build_from_a_folder_sends_nothing(home: Home, tiny_recipe: Path) -> None:
    home.run("build", "--recipe", tiny_recipe, "--out", home.temporary / "artifact")
    assert home.outside() == []


def test_serve_sends_nothing(home: Home, tiny_artifact: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        home.command("serve", tiny_artifact, "--port", port),
        env=home.environment,
        cwd=home.temporary,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                client.open(f"{url}/ready", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
        body = b'{"prompt": "ab", "max_tokens": 4}'
        ask = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        client.open(ask, timeout=60).read()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)
    loopback = {"lookup 127.0.0.1"}  # uvicorn resolves the address that it binds to
    assert {*home.outside()} <= loopback

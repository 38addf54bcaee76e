"""A hub of models on this machine."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's routes for one public model, org/name. Other names get the hub's error codes."""

    files: dict[str, bytes]
    served: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/name/revision/none"):
            self.answer(b"{}", 404, X_Error_Code="RevisionNotFound")
        elif path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040x}"}
                for name, data in self.files.items()
            ]
            self.answer(json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/org/name"):
            self.answer(
                json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode(), Content_Type="application/json"
            )
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/org/name/resolve/{COMMIT}/")
            self.served.append(name)
            self.answer(self.files[name], ETag=f'"{len(self.files[name]):040x}"', X_Repo_Commit=COMMIT)
        elif "/gated/" in path:
            self.answer(b"{}", 403, X_Error_Code="GatedRepo")
        elif "/broken/" in path:
            self.answer(b"{}", 400)
        else:
            self.answer(b"{}", 401, X_Error_Code="RepoNotFound")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    import huggingface_hub
    from huggingface_hub import constants

    Hub.files, Hub.served = {}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield Hub
    server.shutdown()
    server.server_close()
    huggingface_hub.close_session()

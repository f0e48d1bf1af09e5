"""A Hugging Face hub on this machine, as huggingface_hub sees one: reads of data sets, and models that are pushed to it."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "a" * 40


@dataclass
class FakeHub:
    """datasets: name -> path -> bytes. pushed: name of a model -> path -> bytes. token: whose pushes are accepted."""

    url: str = ""
    datasets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    large: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    token: str = "hf_right"


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def reply(self, body: bytes | dict[str, Any] | list[Any], status: int = 200, **headers: str) -> None:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(sent))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)

    def missing(self) -> None:
        self.reply({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        for name, files in self.hub.datasets.items():
            if path == f"/api/datasets/{name}/revision/main":
                return self.reply({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]})
            if path.startswith(f"/api/datasets/{name}/tree/"):
                return self.reply([{"type": "file", "path": file, "size": len(files[file]), "oid": COMMIT} for file in files])
            if path.startswith(resolve := f"/datasets/{name}/resolve/{COMMIT}/"):
                data = files[path.removeprefix(resolve)]
                return self.reply(data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=COMMIT)
        return self.missing()

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"POST {path}")
        sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Authorization"] != f"Bearer {self.hub.token}":
            return self.reply({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(sent)
            self.hub.created.append(asked)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            self.hub.pushed.setdefault(name, {})
            return self.reply({"url": f"{self.hub.url}/{name}", "id": name, "name": name})
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        name = re.sub(r"^/(api/models/)?|(\.git|/preupload|/commit)/.*$", "", path)
        if name not in self.hub.pushed:
            return self.missing()
        if path.endswith("/preupload/main"):
            files = json.loads(sent)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in files}
            answer = [{"path": file, "uploadMode": mode, "shouldIgnore": False, "oid": None} for file, mode in modes.items()]
            return self.reply({"files": answer})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(sent)["objects"]
            uploads = [item | {"actions": {"upload": {"href": f"{self.hub.url}/upload/{item['oid']}"}}} for item in objects]
            return self.reply({"transfer": "basic", "objects": uploads})
        for line in map(json.loads, sent.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.pushed[name][value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                self.hub.pushed[name][value["path"]] = self.hub.large[value["oid"]]
        return self.reply({"success": True, "commitOid": COMMIT, "commitUrl": f"{self.hub.url}/{name}/commit/{COMMIT}"})

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self.reply({})

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Serve a hub that huggingface_hub in this process takes for the real one. cache: a directory for its downloads."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # large files go over Git LFS, as on servers without Xet
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

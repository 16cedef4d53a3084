"""A small model hub on loopback: the parts of the hub's HTTP interface that ``huggingface_hub`` uses.

    GET  /api/models/{id}[/revision/{rev}]         which commit, which files; with ``blobs=true`` their digests
    GET  /api/models/{id}/tree/{rev}               the same as a list, for ``snapshot_download``
    HEAD /{id}/resolve/{rev}/{file}                ETag, X-Repo-Commit; for LFS files X-Linked-Etag and X-Linked-Size
    GET  /{id}/resolve/{rev}/{file}                the bytes, from a Range on where one is asked for

Files that end in .safetensors or .gguf are LFS files (named by SHA-256), all others git blobs (named by SHA-1 of
``blob <size>\\0<bytes>``). No file has a xet hash, so downloads go over plain HTTP.

What can go wrong is set on the instance: ``served`` replaces bytes without touching any digest, ``gate`` answers
401 or 403, ``cuts`` says how many answers about a file (or, under ``api``, of the interface) end in mid-body,
``branches`` may be moved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".gguf", ".bin", ".pt")


def blob_id(data: bytes) -> str:
    """git's id of a blob: SHA-1 over ``blob <size>\\0`` and the bytes."""
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()


@dataclass
class Hub:
    """One repository, its commits and its faults."""

    repository: str
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    listed: dict[str, str] = field(default_factory=dict)
    gate: int | None = None
    token: str | None = None
    cuts: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit, move ``branch`` to it, and give its id."""
        name = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name

    def entry(self, commit: str, name: str) -> dict[str, object]:
        """The metadata of one file, as ``blobs=true`` lists it."""
        data = self.commits[commit][name]
        entry: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": self.listed.get(name, blob_id(data))}
        if name.endswith(LFS):
            entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: object) -> None:
        """Keep standard error clean."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, url = self.hub, urlsplit(self.path)
        hub.requests.append(f"{self.command} {self.path}")
        path = unquote(url.path).strip("/")
        if hub.gate and self.headers.get("Authorization") != f"Bearer {hub.token}":
            code = "GatedRepo" if hub.gate == 403 else "RepoNotFound"
            return self.send(hub.gate, b"{}", {"X-Error-Code": code, "X-Error-Message": "Access is restricted."}, body)
        if path == f"api/models/{hub.repository}" or path.startswith(f"api/models/{hub.repository}/"):
            return self.api(path.removeprefix(f"api/models/{hub.repository}").strip("/"), "blobs" in parse_qs(url.query), body)
        if path.startswith(f"{hub.repository}/resolve/"):
            revision, _, name = path.removeprefix(f"{hub.repository}/resolve/").partition("/")
            return self.file(revision, name, body)
        return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)

    def api(self, rest: str, blobs: bool, body: bool) -> None:
        kind, _, revision = rest.partition("/")
        commit = self.resolve(revision or "main")
        if commit is None:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body)
        entries = [self.hub.entry(commit, name) for name in sorted(self.hub.commits[commit])]
        if kind == "tree":
            tree = [
                {"type": "file", "path": e["rfilename"], "size": e["size"], "oid": e["blobId"]}
                | ({"lfs": {"oid": e["lfs"]["sha256"], "size": e["size"], "pointerSize": 130}} if "lfs" in e else {})  # type: ignore[index]
                for e in entries
            ]
            return self.send(200, json.dumps(tree).encode(), {}, body)
        siblings = entries if blobs else [{"rfilename": entry["rfilename"]} for entry in entries]
        document = {"id": self.hub.repository, "modelId": self.hub.repository, "sha": commit, "siblings": siblings, "private": False}
        return self.send(200, json.dumps(document).encode(), {}, body)

    def file(self, revision: str, name: str, body: bool) -> None:
        commit = self.resolve(revision)
        if commit is None:
            return self.send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        if name not in self.hub.commits[commit]:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, body)
        entry = self.hub.entry(commit, name)
        data = self.hub.served.get(name, self.hub.commits[commit][name])
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["blobId"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            headers |= {"X-Linked-Etag": f'"{entry["lfs"]["sha256"]}"', "X-Linked-Size": str(entry["size"])}  # type: ignore[index]
        status, asked = 200, self.headers.get("Range", "")
        if asked.startswith("bytes="):
            first = int(asked.removeprefix("bytes=").partition("-")[0])
            status, headers["Content-Range"] = 206, f"bytes {first}-{len(data) - 1}/{len(data)}"
            data = data[first:]
        return self.send(status, data, headers, body)

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.hub.commits else self.hub.branches.get(revision)

    def send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if not body:
            return
        about = "api" if self.path.startswith("/api/") else unquote(urlsplit(self.path).path).rpartition("/")[2]
        if self.hub.cuts.get(about, 0) > 0 and status in (200, 206):
            self.hub.cuts[about] -= 1
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        else:
            self.wfile.write(data)


@contextmanager
def serve(repository: str = "org/model") -> Iterator[Hub]:
    """A hub with one repository, on a free port of loopback, for the time of the block."""
    hub = Hub(repository)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A real server over a real archive: pages are asked for over HTTP on loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from ledger.web import create_app
from tests.web.examples import Example, fill


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.body, parse_constant=refuse)


@dataclass(frozen=True)
class Site:
    """A running server. ``get`` sends the path as it stands, unlike a client that tidies it first."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, host: str | None = None, method: str = "GET") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True)
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
            connection.endheaders()
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    """Serve the archive in ``folder`` from a thread."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # so that a first request waits for the server instead of being refused
        server = uvicorn.Server(uvicorn.Config(create_app(folder), log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Site(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """An archive with something of everything. Read it; do not change it."""
    return fill(tmp_path_factory.mktemp("example") / "archive")


@pytest.fixture(scope="session")
def site(example: Example) -> Iterator[Site]:
    """A server over the example archive."""
    with serving(example.folder) as running:
        yield running

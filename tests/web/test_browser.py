"""The pages in a real browser: nothing that was recorded runs, the policy holds, the table is there to be seen.

Needs Debian's ``chromium``. Where CI is set a missing browser fails; elsewhere the tests are skipped.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from ledger.web import HEADERS
from tests.web.conftest import Site
from tests.web.examples import HOSTILE, Example

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None:
        reason = "no browser: apt-get install chromium"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def browse(chromium: str, profile: Path, url: str, *more: str) -> str:
    """The page's markup after it was loaded and whatever could run had run."""
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=2000", *more, url]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def title(dom: str) -> str:
    found = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert found is not None
    return html.unescape(found[1])


def test_this_browser_would_run_the_hostile_name_if_a_page_let_it(chromium: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare.html"
    bare.write_text(f"<!doctype html><title>{HOSTILE}", encoding="utf-8")
    assert title(browse(chromium, tmp_path / "profile", bare.as_uri(), "--dump-dom")) == "owned"


@pytest.mark.parametrize("path", ["/", "/runs", "/runs/{hostile}", "/log", "/compare?a={hostile}&b={good}", "/objects/{log}/preview"])
def test_a_hostile_name_is_text_and_does_not_run(chromium: str, tmp_path: Path, site: Site, example: Example, path: str) -> None:
    address = path.format(log=example.log, **example.runs)
    dom = browse(chromium, tmp_path, site.url + address, "--dump-dom")
    assert title(dom).endswith("K/V evidence ledger")
    assert title(dom) != "owned"
    assert "<script" not in dom
    assert "document.title='owned'" in html.unescape(dom)


def test_the_policy_alone_stops_a_script_that_slipped_through(chromium: str, tmp_path: Path) -> None:
    app = FastAPI()
    app.get("/open")(lambda: HTMLResponse(f"<!doctype html><title>{HOSTILE}"))
    app.get("/shut")(lambda: HTMLResponse(f"<!doctype html><title>{HOSTILE}", headers=HEADERS))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert title(browse(chromium, tmp_path / "a", f"{base}/open", "--dump-dom")) == "owned"
            assert title(browse(chromium, tmp_path / "b", f"{base}/shut", "--dump-dom")) == ""
        finally:
            server.should_exit = True
            thread.join()


def test_the_status_table_is_there_with_its_rows_and_its_style(chromium: str, tmp_path: Path, site: Site) -> None:
    dom = browse(chromium, tmp_path / "profile", f"{site.url}/", "--dump-dom")
    rows = site.get("/status.json").json()["rows"]
    assert dom.count('<tr role="row" id="claim-') == len(rows)
    assert "What the words mean" in dom
    sizes = {}
    for width in (1280, 390):
        picture = tmp_path / f"{width}.png"
        browse(chromium, tmp_path / "profile", f"{site.url}/", f"--window-size={width},900", f"--screenshot={picture}", "--hide-scrollbars")
        data = picture.read_bytes()
        assert struct.unpack(">II", data[16:24]) == (width, 900)
        sizes[width] = len(data)
    assert min(sizes.values()) > 10_000  # a blank page compresses to less

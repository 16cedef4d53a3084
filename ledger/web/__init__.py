"""The web view: read-only pages over an archive, each with a JSON twin. Served on 127.0.0.1 alone.

    GET /                       the status table          /status.json   /status.csv
    GET /recipes.json           the recipes alone, as the status page shows them
    GET /runs                   all runs                  /runs.json
    GET /runs/{run}             one run, by its digest    /runs/{run}.json
    GET /compare?a=RUN&b=RUN    two runs side by side     /compare.json
    GET /log                    the log and its head      /log.json
    GET /objects/{sha256}       the bytes, as a download  /objects/{sha256}/preview: the beginning of a text
    GET /openapi.json           what this API is

What is recorded was written by others. So every string is escaped, no page runs a script (and the policy that is
sent forbids any), evidence is never shown as a page of this origin, and a request for another host's name is refused,
which keeps a stranger's page from reading this one through a name that points here.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import unquote

import jinja2
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ledger
from ledger import queries
from ledger.archive import Archive
from ledger.errors import ArchiveError, InputError, LedgerError, RedactedError, SchemaError
from ledger.web import pages, precisionpage, runpage

HOSTS = ("localhost", "127.0.0.1")
"""Names under which this view answers."""

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
OBJECT_POLICY = "default-src 'none'; sandbox"

PREVIEW_BYTES = 64 << 10
_BLOCK = 1 << 20
_SAFE_TYPES = ("application/json", "application/octet-stream", "application/vnd.safetensors", "text/plain")
_ASSETS = {"style.css": "text/css; charset=utf-8", "favicon.svg": "image/svg+xml"}


def templates() -> jinja2.Environment:
    """The templates: everything escaped, and a name that a page does not have is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(ledger.home("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


Open = Callable[[], Archive]
Html = Callable[[str, pages.Page], Response]
Failed = Callable[[Request, int, LedgerError], Response]


# ---------------------------------------------------------------- before and after every request


class _Guard:
    """Refuses paths that try to be clever, answers HEAD, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, refuse: Callable[[Request], Response]) -> None:
        self.app = app
        self.refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["method"] == "HEAD":  # answered as GET; the server leaves the body out
            scope = {**scope, "method": "GET"}
        if clever(scope["path"]):
            await self.refuse(Request(scope))(scope, receive, with_headers)
        else:
            await self.app(scope, receive, with_headers)


def clever(path: str) -> bool:
    """Whether a path, decoded as often as it is encoded, holds ``..``, a backslash or a control character."""
    for _ in range(8):
        if any(ord(sign) < 32 or ord(sign) == 127 or sign == "\\" for sign in path) or ".." in path.split("/"):
            return True
        decoded = unquote(path)
        if decoded == path:
            return False
        path = decoded
    return True


# ---------------------------------------------------------------- the application


def create_app(folder: Path, url: str | None = None) -> FastAPI:
    """The view of the archive in ``folder``; ``url`` chooses another database than its own. Opened anew for each request."""
    environment = templates()
    app = FastAPI(
        title="K/V evidence ledger",
        version=ledger.__version__,
        description="Read-only view of an archive of KV-cache tests. Numbers that JSON cannot hold are written as "
        '{"number": "NaN"}, "Infinity", "-Infinity", "-0.0", or an integer beyond 2**53 - 1 in full.',
        docs_url=None,  # the usual documentation pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
    )

    def open_archive() -> Archive:
        return Archive.open(folder, url)

    def html(template: str, page: pages.Page, status: int = 200) -> HTMLResponse:
        return HTMLResponse(environment.get_template(template).render(page=page), status_code=status)

    def failed(request: Request, status: int, error: LedgerError) -> Response:
        if request.url.path.endswith(".json"):
            fields = {name: getattr(error, name) for name in ("what", "expected", "found", "next")}
            return JSONResponse({"error": fields}, status_code=status, headers=HEADERS)
        page = html("error.html", pages.error_page(status, error), status)
        page.headers.update(HEADERS)
        return page

    def refuse(request: Request) -> Response:
        return failed(
            request,
            400,
            InputError(
                "This address is refused.", expected='no "..", no backslash, no control character', next="start at the status table."
            ),
        )

    _add_pages(app, open_archive, html)
    _add_objects(app, open_archive, html)
    _add_errors(app, failed)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    app.add_middleware(_Guard, refuse=refuse)
    return app


def _add_pages(app: FastAPI, open_archive: Open, html: Html) -> None:
    for name, media_type in _ASSETS.items():
        data = (ledger.home("templates") / name).read_bytes()
        app.get(f"/{name}", include_in_schema=False)(lambda data=data, kind=media_type: Response(data, media_type=kind))

    @app.get("/", include_in_schema=False)
    def status_page() -> Response:
        with open_archive() as archive:
            return html("status.html", pages.status_page(queries.status(archive)))

    @app.get("/status.json", summary="The status table")
    def status() -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.status(archive))

    @app.get("/status.csv", summary="The status table as CSV", response_class=Response)
    def status_csv() -> Response:
        with open_archive() as archive:
            text = pages.status_csv(queries.status(archive))
        headers = {"content-disposition": 'attachment; filename="status.csv"'}
        return Response(text, media_type="text/csv; charset=utf-8", headers=headers)

    @app.get("/recipes.json", summary="All recipes, each as far as its claims reach now")
    def recipes() -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.recipes_of(archive))

    @app.get("/runs", include_in_schema=False)
    def runs_page() -> Response:
        with open_archive() as archive:
            return html("runs.html", pages.runs_page(queries.runs(archive)))

    @app.get("/runs.json", summary="All runs")
    def runs() -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.runs(archive))

    @app.get("/runs/{run}.json", summary="One run in full; RUN may be a unique prefix of its digest")
    def run(run: str) -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.run(archive, _known(archive, run)))

    @app.get("/runs/{run}", include_in_schema=False)
    def run_page(run: str) -> Response:
        with open_archive() as archive:
            found = _known(archive, run)
            if found != run:
                return RedirectResponse(f"/runs/{found}", status_code=307)
            return html("run.html", runpage.run_page(queries.run(archive, found)))

    @app.get("/compare.json", summary="Two runs side by side")
    def compare(a: str, b: str) -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.compare(archive, _known(archive, a), _known(archive, b)))

    @app.get("/compare", include_in_schema=False)
    def compare_page(a: Annotated[str, Query()] = "", b: Annotated[str, Query()] = "") -> Response:
        with open_archive() as archive:
            left, right = (_known(archive, name) if name else "" for name in (a, b))
            document = queries.compare(archive, left, right) if left and right else None
            return html("compare.html", pages.compare_page(queries.runs(archive), document, left, right))

    @app.get("/precision/{checkpoint}.json", summary="Formats and scale policies of one checkpoint, by its digest, in one table")
    def precision(checkpoint: str) -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(_precision(archive, checkpoint))

    @app.get("/precision/{checkpoint}", include_in_schema=False)
    def precision_page(checkpoint: str) -> Response:
        with open_archive() as archive:
            return html("precision.html", precisionpage.precision_page(_precision(archive, checkpoint)))

    @app.get("/log.json", summary="The log and its head")
    def log() -> JSONResponse:
        with open_archive() as archive:
            return JSONResponse(queries.log(archive))

    @app.get("/log", include_in_schema=False)
    def log_page() -> Response:
        with open_archive() as archive:
            return html("log.html", pages.log_page(queries.log(archive)))


class _UnknownError(InputError):
    """What was asked for is not in the archive."""


def _known(archive: Archive, name: str) -> str:
    try:
        return archive.resolve(name)
    except InputError as error:
        raise _UnknownError(error.what, expected=error.expected, found=error.found, next="choose one from the list of runs.") from error


def _precision(archive: Archive, checkpoint: str) -> dict[str, Any]:
    try:
        return queries.precision_table(archive, checkpoint)
    except InputError as error:
        raise _UnknownError(error.what, expected=error.expected, found=error.found, next="follow the links of the status table.") from error


# ---------------------------------------------------------------- objects


def _checked(archive: Archive, sha256: str) -> tuple[BinaryIO, int, bytes]:
    """An object's open file at its start, its size and its first bytes, after its digest was checked in blocks."""
    stream = archive.store.open(sha256)
    state, size, head = hashlib.sha256(), 0, b""
    while block := stream.read(_BLOCK):
        state.update(block)
        size += len(block)
        head = head or block[:PREVIEW_BYTES]
    if state.hexdigest() != sha256:
        stream.close()
        raise ArchiveError(
            f"Object {sha256} is damaged: its bytes are not those of its name.",
            expected=sha256,
            found=state.hexdigest(),
            next="restore that object from a copy of the archive, then run `ledger verify`.",
        )
    stream.seek(0)
    return stream, size, head


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    with stream:
        while block := stream.read(_BLOCK):
            yield block


def _object(archive: Archive, sha256: str) -> dict[str, Any]:
    found = queries.evidence(archive, sha256) if len(sha256) == 64 else None
    if found is None:
        raise _UnknownError(
            "No record of this archive names this object.",
            expected="the 64 lower-case hex digits of a record or a file of evidence",
            found=sha256[:80],
            next="follow the links of a run's page.",
        )
    archive.refuse_redacted(sha256)
    return found


def _add_objects(app: FastAPI, open_archive: Open, html: Html) -> None:
    @app.get("/objects/{sha256}", summary="The bytes of one object, as a download", response_class=Response)
    def download(sha256: str) -> Response:
        with open_archive() as archive:
            found = _object(archive, sha256)
            stream, size, _ = _checked(archive, sha256)
        name = found["name"].rsplit("/", 1)[-1]  # of the letters that a record's paths may hold
        headers = {
            "content-disposition": f'attachment; filename="{name}"',
            "content-length": str(size),
            "content-security-policy": OBJECT_POLICY,
            "etag": f'"{sha256}"',
        }
        kind = found["media_type"] if found["media_type"] in _SAFE_TYPES else "application/octet-stream"
        return StreamingResponse(_blocks(stream), media_type=kind, headers=headers)

    @app.get("/objects/{sha256}/preview", include_in_schema=False)
    def preview(sha256: str) -> Response:
        with open_archive() as archive:
            found = _object(archive, sha256)
            if not runpage.previewable(found["media_type"]):
                raise _UnknownError("This object is no text, so there is no preview.", found=found["media_type"], next="download it.")
            stream, size, head = _checked(archive, sha256)
            stream.close()
        return html("preview.html", pages.preview_page(found["name"], sha256, size, head, size > len(head)))


# ---------------------------------------------------------------- errors


def _add_errors(app: FastAPI, failed: Failed) -> None:
    def ledger_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, LedgerError)
        known = {_UnknownError: 404, SchemaError: 503, RedactedError: 410}
        status = next((status for kind, status in known.items() if isinstance(error, kind)), 500)
        return failed(request, status, error)

    def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return failed(request, 404, InputError("There is no page at this address.", next="start at the status table."))
        if error.status_code == 405:
            return failed(request, 405, InputError("This view is read-only.", expected="GET", found=request.method))
        return failed(request, error.status_code, InputError("The request was refused.", found=str(error.detail)))

    def invalid(request: Request, error: Exception) -> Response:
        lacking = InputError("The address lacks something.", expected="a=RUN and b=RUN", next="choose two runs on the compare page.")
        return failed(request, 400, lacking)

    def unexpected(request: Request, error: Exception) -> Response:
        fault = LedgerError(
            "This page could not be made: a fault of this program.",
            found=type(error).__name__,
            next="run `ledger verify`; if it finds nothing, report the fault with what the server printed.",
        )
        return failed(request, 500, fault)

    app.add_exception_handler(LedgerError, ledger_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unexpected)


# ---------------------------------------------------------------- serving


def serve(folder: Path, url: str | None = None, port: int = 8000) -> None:
    """Serve the archive on 127.0.0.1 until interrupted; port 0 takes a free one. Raises ArchiveError where the port is taken."""
    import uvicorn  # slow to import, and only `ledger serve` needs it

    with Archive.open(folder, url):  # fail before listening, with the words of the archive
        pass
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with closing(listener):
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()  # from here on a request waits for the server instead of being refused
        except (OSError, OverflowError) as error:
            raise ArchiveError(f"Port {port} cannot be used.", found=str(error), next="choose another with --port.") from error
        print(f"The archive is shown at http://127.0.0.1:{listener.getsockname()[1]}/ until you press Ctrl-C.", flush=True)
        config = uvicorn.Config(create_app(folder, url), log_level="warning", server_header=False, access_log=False, ws="none")
        uvicorn.Server(config).run(sockets=[listener])

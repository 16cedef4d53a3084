"""The routes over real HTTP: pages and their twins, downloads, refusals, headers, damage."""

from __future__ import annotations

import csv
import html
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import queries, recipes
from ledger.archive import Archive
from ledger.errors import ArchiveError
from ledger.web import HEADERS, clever, create_app, serve
from ledger.web.pages import harmless
from tests.web.conftest import Site, serving
from tests.web.examples import HOSTILE, Example

PAGES = ("/", "/runs", "/runs/{good}", "/runs/{hostile}", "/runs/{failed}", "/compare", "/compare?a={good}&b={hostile}", "/log", "/nothing")
TABLE = "/precision/"
"""Before the digest of a checkpoint."""


def address(path: str, example: Example) -> str:
    return path.format(**example.runs)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_html_with_the_security_headers_and_no_script(site: Site, example: Example, path: str) -> None:
    answer = site.get(address(path, example))
    assert answer.status == (404 if path == "/nothing" else 200)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "'unsafe" not in answer.headers["content-security-policy"]
    assert "<script" not in answer.text
    assert " style=" not in answer.text
    assert " onerror=&#34;" in answer.text or " onerror=" not in answer.text
    assert "http://" not in answer.text.replace("http://www.w3.org", "")
    assert "https://" not in answer.text


def test_json_twins_are_the_documents_of_the_queries(site: Site, example: Example) -> None:
    good, again = example.runs["good"], example.runs["again"]
    with Archive.open(example.folder) as archive:
        assert site.get("/status.json").json() == queries.status(archive)
        assert site.get("/recipes.json").json() == queries.recipes_of(archive) == queries.status(archive)["recipes"] != []
        assert site.get("/runs.json").json() == queries.runs(archive)
        assert site.get(f"/runs/{good}.json").json() == queries.run(archive, good)
        assert site.get(f"/compare.json?a={good}&b={again}").json() == queries.compare(archive, good, again)
        assert site.get("/log.json").json() == queries.log(archive)
        tables = queries.precision_tables(archive)
    assert len(tables) == 2
    for table in tables:
        assert site.get(f"{TABLE}{table['checkpoint']}.json").json() == table


def test_a_table_of_precision_is_a_page_that_the_status_page_leads_to(site: Site) -> None:
    found = set(re.findall(rf'href="({TABLE}[0-9a-f]{{64}})"', site.get("/").text))
    assert len(found) == 2
    for path in found:
        answer = site.get(path)
        assert answer.status == 200 and {name: answer.headers[name] for name in HEADERS} == HEADERS
        assert "<script" not in answer.text and "loss difference mean: met" in answer.text
    for path in (f"{TABLE}{'0' * 64}", f"{TABLE}abc.json"):
        assert site.get(path).status == 404 and "No spec of this archive" in site.get(path).text


def test_a_run_with_nan_is_shown_and_its_twin_is_strict_json(site: Site, example: Example) -> None:
    page = site.get(f"/runs/{example.runs['hostile']}")
    assert page.status == 200
    assert ">NaN<" in page.text
    assert "\u2212∞" in page.text
    assert "9,007,199,254,740,993 bytes" in page.text
    document = site.get(f"/runs/{example.runs['hostile']}.json").json()
    measured = {found["name"]: found for arm in document["arms"] for found in arm["measurements"]}
    assert measured["loss_mean"]["value"] == {"number": "NaN"}
    assert measured["loss_mean"]["lower"] == {"number": "-Infinity"}
    assert measured["loss_difference_mean"]["value"] == {"number": "-0.0"}
    assert measured["cache_bytes"]["value"] == {"number": "9007199254740993"}


def test_the_api_describes_itself_and_loads_no_page_from_elsewhere(site: Site) -> None:
    described = site.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/status.json",
        "/status.csv",
        "/recipes.json",
        "/runs.json",
        "/runs/{run}.json",
        "/compare.json",
        "/log.json",
        "/precision/{checkpoint}.json",
        "/objects/{sha256}",
    }
    assert all(set(methods) == {"get"} for methods in described["paths"].values())
    assert site.get("/docs").status == site.get("/redoc").status == 404


def test_no_route_changes_anything() -> None:
    routes = create_app(Path("nowhere")).routes
    assert {method for route in routes for method in getattr(route, "methods", ())} <= {"GET", "HEAD"}


def test_a_method_other_than_get_is_refused(site: Site) -> None:
    answer = site.get("/runs", method="POST")
    assert answer.status == 405
    assert "read-only" in answer.text


def test_head_is_answered_without_a_body(site: Site) -> None:
    answer, whole = site.get("/runs", method="HEAD"), site.get("/runs")
    assert (answer.status, answer.text) == (200, "")
    assert answer.headers["content-length"] == whole.headers["content-length"]


def test_a_unique_prefix_leads_to_the_run(site: Site, example: Example) -> None:
    good = example.runs["good"]
    answer = site.get(f"/runs/{good[:12]}")
    assert (answer.status, answer.headers["location"]) == (307, f"/runs/{good}")
    assert site.get(f"/runs/{good[:12]}.json").json()["id"] == good


@pytest.mark.parametrize(
    "path", ["/runs/0000000000", "/runs/not-a-run", "/runs/" + "0" * 64, "/objects/" + "0" * 64, "/objects/x", "/runs/%E2%82%AC"]
)
def test_an_unknown_id_is_a_helpful_404(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status == 404
    assert 'href="/runs"' in answer.text


def test_an_unknown_run_has_a_json_twin_that_says_so(site: Site) -> None:
    answer = site.get("/runs/0000000000.json")
    assert answer.status == 404
    assert answer.json()["error"]["what"] == "No run of this archive begins so."


@pytest.mark.parametrize("path", ["/compare.json", "/compare.json?a=1"])
def test_a_comparison_without_two_runs_says_what_it_lacks(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status == 400
    assert answer.json()["error"]["expected"] == "a=RUN and b=RUN"


@pytest.mark.parametrize(
    "path",
    [
        "/objects/../log/head",
        "/objects/%2e%2e/log/head",
        "/objects/%252e%252e%252flog",
        "/objects/..%2f..%2fetc%2fpasswd",
        "/runs/a%00b",
        "/runs/a%0d%0aset-cookie:x",
        "/style.css%00",
        "/objects/..%5c..%5cx",
        "/" + "%25" * 40 + "2e",
    ],
)
def test_a_path_that_tries_to_be_clever_is_refused(site: Site, path: str) -> None:
    answer = site.get(path)
    assert answer.status in (400, 404)
    assert answer.status == 400 or not clever(path)
    assert answer.headers["content-security-policy"] == HEADERS["content-security-policy"]
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1"])
def test_a_name_that_is_not_ours_is_refused_against_rebinding(site: Site, host: str) -> None:
    answer = site.get("/status.json", host=host)
    assert answer.status == 400
    assert b"rows" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1"])
def test_our_own_names_are_answered(site: Site, host: str) -> None:
    assert site.get("/status.json", host=host).status == 200


def test_evidence_is_a_download_that_no_browser_runs(site: Site, example: Example) -> None:
    document = site.get(f"/runs/{example.runs['good']}.json").json()
    files = {file["name"]: file for file in document["evidence"]}
    assert {"result.json", "samples/0000.safetensors", "log.txt", "page.html"} <= set(files)
    with Archive.open(example.folder) as archive:
        for file in files.values():
            answer = site.get(f"/objects/{file['sha256']}")
            assert answer.body == archive.store.read(file["sha256"])
            assert answer.headers["content-disposition"] == f'attachment; filename="{file["name"].rsplit("/", 1)[-1]}"'
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
            assert "html" not in answer.headers["content-type"]
    assert site.get(f"/objects/{files['page.html']['sha256']}").headers["content-type"] == "application/octet-stream"


def test_a_record_of_the_log_can_be_downloaded(site: Site, example: Example) -> None:
    entry = site.get("/log.json").json()["entries"][0]
    answer = site.get(f"/objects/{entry['record']}")
    assert answer.headers["content-disposition"] == 'attachment; filename="spec.json"'
    assert answer.body.startswith(b'{"arms"')


def test_an_object_that_no_record_names_is_not_served(tmp_path: Path) -> None:
    with Archive.create(tmp_path / "archive") as archive:
        stray = archive.store.put(b"left by a writer that was killed")
    with serving(tmp_path / "archive") as site:
        assert site.get(f"/objects/{stray}").status == 404


def test_a_text_has_a_preview_that_is_escaped_and_cut(site: Site, example: Example) -> None:
    answer = site.get(f"/objects/{example.log}/preview")
    assert answer.status == 200
    assert "&lt;script&gt;" in answer.text
    assert "The whole file." in answer.text
    files = {file["name"]: file["sha256"] for file in site.get(f"/runs/{example.runs['good']}.json").json()["evidence"]}
    assert site.get(f"/objects/{files['samples/0000.safetensors']}/preview").status == 404


def test_an_empty_archive_says_what_to_do(tmp_path: Path) -> None:
    with Archive.create(tmp_path / "archive"):
        pass
    with serving(tmp_path / "archive") as site:
        assert "No claim yet" in site.get("/").text
        assert "No run is recorded yet" in site.get("/runs").text
        assert "The log is empty" in site.get("/log").text
        assert site.get("/compare").status == 200
        assert site.get("/status.json").json() == {"rows": [], "reported": [], "recipes": []}
        assert site.get("/recipes.json").json() == [] and "Of a recipe" not in site.get("/").text


def test_the_legend_has_the_words_of_recipes_beside_the_recipes_and_their_twin(site: Site) -> None:
    text = site.get("/").text
    assert 'href="/recipes.json"' in text
    legend = html.unescape(text[text.index("Of a recipe") :])
    assert [word for word, meaning in recipes.WORDS.items() if f"<dd>{meaning}</dd>" in legend] == [
        "supported",
        "supported in part",
        "not supported",
        "lapsed",
    ]
    assert html.unescape(text).count(f"<dd>{recipes.WORDS['retracted']}</dd>") == 1


def test_a_damaged_object_is_named_on_a_page_of_its_own(example: Example, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(example.folder, folder)
    path = folder / "objects" / example.log[:2] / example.log[2:]
    path.write_bytes(b"X" + path.read_bytes()[1:])
    with serving(folder) as site:
        for suffix in ("", "/preview"):
            answer = site.get(f"/objects/{example.log}{suffix}")
            assert answer.status == 500
            assert f"Object {example.log} is damaged" in answer.text
            assert "ledger verify" in answer.text
            assert "Traceback" not in answer.text
        path.unlink()
        assert "cannot be read" in site.get(f"/objects/{example.log}").text
        assert site.get("/").status == 200


def test_a_damaged_database_is_a_page_that_says_so(example: Example, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(example.folder, folder)
    for file in folder.glob("ledger.db*"):
        file.unlink()
    (folder / "ledger.db").write_bytes(b"this is no database " * 100)
    with serving(folder) as site:
        answer = site.get("/")
        assert answer.status == 500
        assert "ledger rebuild" in answer.text
        assert answer.headers["x-frame-options"] == "DENY"
        assert "error" in site.get("/status.json").json()


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n", " ="])
def test_a_cell_that_begins_like_a_formula_is_neutralised(sign: str) -> None:
    assert harmless(f"{sign}1+1") == f"'{sign}1+1"


@pytest.mark.parametrize("cell", ["", "k16v8", "1", "a=b"])
def test_a_plain_cell_is_left_alone(cell: str) -> None:
    assert harmless(cell) == cell


def test_the_csv_holds_every_row(site: Site) -> None:
    answer = site.get("/status.csv")
    table = list(csv.reader(io.StringIO(answer.text)))
    rows = site.get("/status.json").json()["rows"]
    assert len(table) == len(rows) + 1
    assert HOSTILE in {row[0] for row in table}
    assert answer.headers["content-disposition"].startswith("attachment")


def test_serving_a_folder_that_is_no_archive_fails_before_it_listens(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from ledger.web import serve; serve(Path(sys.argv[1]), None, 0)"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert "is no archive" in done.stderr


def test_the_server_says_where_it_is_and_listens_on_loopback_alone(example: Example) -> None:
    code = "import sys; from pathlib import Path; from ledger.web import serve; serve(Path(sys.argv[1]), None, 0)"
    server = subprocess.Popen([sys.executable, "-c", code, str(example.folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        said = re.search(r"http://127\.0\.0\.1:(\d+)/", server.stdout.readline())
        assert said is not None
        site = Site(int(said[1]))
        assert site.get("/status.json").status == 200
        with pytest.raises(ArchiveError, match="cannot be used"):
            serve(example.folder, None, site.port)
    finally:
        server.terminate()
        server.communicate(timeout=30)

"""What documents outside say: recorded as reported, never as evidence, and never among the claims."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from ledger import digest, queries, records, reports, terminal
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.verify import verify
from ledger.web import pages, templates
from tests import factories
from tests.conftest import append_derived_run, append_outside
from tests.ledger.test_archive import assert_whole

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "docs" / "reports" / "recent-models.toml"
GIVEN = {digest.sha256(factories.DOCUMENT): factories.DOCUMENT}
HOSTILE = "</td><script>document.title='owned'</script>=cmd|' /C calc'!A0\x1b[2J"


def plain(**changes: Any) -> dict[str, Any]:
    """A report as a file has it."""
    found = records.plain(factories.report())
    return {**{name: value for name, value in found.items() if name not in ("format", "evidence")}, "bytes": "digest only", **changes}


def written(folder: Path, content: Any, name: str = "report.json") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


# ---------------------------------------------------------------- recording


def test_a_report_is_shown_apart_from_the_claims_and_verifies(archive: Archive, database_url: str | None) -> None:
    append_derived_run(archive, 0)
    before = queries.status(archive)["rows"]
    name = archive.append(factories.report(), GIVEN).record
    document = queries.status(archive)
    assert document["rows"] == before
    said = document["reported"]
    assert [(row["model"], row["status"], row["outcome"]) for row in said] == [
        ("Model A", "reported", "passes"),
        ("Model B", "reported", "not measured"),
    ]
    assert {row["report"] for row in said} == {name}
    assert len({row["key"] for row in said}) == 2
    assert said[0]["document"]["sha256"] == digest.sha256(factories.DOCUMENT)
    assert archive.store.read(digest.sha256(factories.DOCUMENT)) == factories.DOCUMENT
    assert queries.log(archive)["entries"][-1]["says"] == "a document outside is reported on: What model A and model B do"
    assert_whole(archive)
    assert verify(archive.folder, database_url).findings == []
    archive.rebuild()
    assert queries.status(archive) == document


def test_a_report_twice_is_once_and_another_on_its_document_is_refused_until_it_is_retracted(archive: Archive) -> None:
    first = archive.append(factories.report(), GIVEN)
    assert archive.append(factories.report(), GIVEN) == first
    other = factories.report(facts=(factories.fact(says="Some answers are kept."),))
    with pytest.raises(InputError, match=r"(?s)recorded already, and says something else.*ledger retract"):
        archive.append(other)
    archive.append(records.Retract(format="kv-ledger/retract/2", record=first.record, author="A", reason="not what it says"))
    archive.append(other)
    said = queries.status(archive)["reported"]
    assert [row["status"] for row in said] == ["retracted", "retracted", "reported"]
    assert said[0]["reason"] == "retracted by A: not what it says"
    assert_whole(archive)


def test_what_is_retracted_must_be_there_and_of_a_kind_that_can_be(archive: Archive) -> None:
    run = append_derived_run(archive, 0).record
    for name in (run, "0" * 64):
        with pytest.raises(InputError, match="no report and no recipe"):
            archive.append(records.Retract(format="kv-ledger/retract/2", record=name, author="A", reason="B"))
    report = archive.append(factories.report(), GIVEN).record
    with pytest.raises(InputError, match="not recorded here"):
        archive.append(records.Retract(format="kv-ledger/retract/1", run=report, author="A", reason="B"))


def test_a_retraction_of_a_run_keeps_the_bytes_that_it_always_had() -> None:
    old = records.Retract(format="kv-ledger/retract/1", run="0" * 64, author="a", reason="b")
    assert records.encode(old) == b'{"author":"a","format":"kv-ledger/retract/1","reason":"b","run":"%s"}' % (b"0" * 64)
    for fields in ({"format": "kv-ledger/retract/1", "record": "0" * 64}, {"format": "kv-ledger/retract/2", "run": "0" * 64}):
        with pytest.raises(InputError, match="names a `run`"):
            records.convert(records.Retract, {**fields, "author": "a", "reason": "b"}, "it")


def test_a_document_that_was_changed_or_lost_is_found(archive: Archive, database_url: str | None) -> None:
    name = archive.append(factories.report(), GIVEN).record
    path = archive.store.object_path(digest.sha256(factories.DOCUMENT))
    path.write_bytes(b"X" + factories.DOCUMENT[1:])
    (finding,) = verify(archive.folder, database_url).findings
    assert (finding.kind, f"document of report {name}" in finding.detail) == ("object_changed", True)
    path.unlink()
    (finding,) = verify(archive.folder, database_url).findings
    assert finding.kind == "object_missing"


def test_a_kept_document_is_served_as_a_download_and_a_digest_alone_is_not(archive: Archive) -> None:
    archive.append(factories.report(), GIVEN)
    archive.append(factories.report(sha256="1" * 64, bytes="digest only", license="", evidence=()))
    found = queries.evidence(archive, digest.sha256(factories.DOCUMENT))
    assert found is not None and found["media_type"] == "application/octet-stream"
    assert queries.evidence(archive, "1" * 64) is None


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"surprise": 1}, "surprise"),
        ({"title": None}, "title"),
        ({"title": " \n"}, "title"),
        ({"place": ""}, "place"),
        ({"sha256": "A" * 64}, "sha256"),
        ({"sha256": "0" * 63}, "sha256"),
        ({"size": 0}, "size"),
        ({"size": "49"}, "size"),
        ({"size": 2**63}, "size"),
        ({"bytes": "some"}, "bytes"),
        ({"license": None}, "license"),
        ({"facts": []}, "facts"),
        ({"facts": [{**records.plain(factories.fact()), "status": "established"}]}, "status"),
        ({"facts": [{**records.plain(factories.fact()), "outcome": "established"}]}, "outcome"),
        ({"facts": [{**records.plain(factories.fact()), "scope": "speed"}]}, "scope"),
        ({"facts": [{**records.plain(factories.fact()), "says": "\t"}]}, "says"),
        ({"facts": [{**records.plain(factories.fact()), "says": "x" * 8193}]}, "says"),
        ({"facts": [records.plain(factories.fact()), records.plain(factories.fact(says="Other words."))]}, "two facts are about one"),
        ({"facts": [records.plain(factories.fact(model=f"M{at}")) for at in range(1001)]}, "facts"),
        ({"format": "kv-ledger/report/1"}, "not its own to give: format"),
        ({"evidence": []}, "not its own to give: evidence"),
    ],
    ids=str,
)
def test_a_report_that_is_wrong_is_refused_and_says_where(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        reports.read(written(tmp_path, plain(**change)))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("r.json", b"{", "not JSON"),
        ("r.json", b"[]", "holds no keys"),
        ("r.json", b'{"title": "a", "title": "b"}', "names a key twice"),
        ("r.json", b'{"title": NaN}', "bare constant"),
        ("r.toml", b"title = ", "not TOML"),
        ("r.toml", b"title = '\xff'", "not UTF-8"),
        ("r.toml", b"title = 2020-01-01", "not a valid Report"),
        ("r.toml", b"a = " + b"[" * 100_000, "not TOML"),
        ("r.toml", b"title = '" + b"x" * (10 << 20) + b"'", "too large"),
        ("r.toml", b"title = '" + b"x" * (3 << 20) + b"'", "at most 8192 characters"),
    ],
    ids=range(10),
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        reports.read(written(tmp_path, content, name))


@pytest.mark.parametrize("name", ["nothing.toml", ".", "a\0b"])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="There is no report"):
        reports.read(tmp_path / name)


def test_text_with_nul_is_refused_on_every_database(archive: Archive, tmp_path: Path) -> None:
    report, _ = reports.read(written(tmp_path, plain(place="a\0b")))
    with pytest.raises(InputError, match="NUL character in place"):
        archive.append(report)


def test_a_document_is_checked_against_its_digest_and_kept_only_where_its_licence_is_named(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(factories.DOCUMENT)
    wrong.write_bytes(factories.DOCUMENT + b".")
    digest_only = written(tmp_path, plain())
    assert reports.read(digest_only, right)[1] == {}
    for bad in (wrong, tmp_path / "none"):
        with pytest.raises(InputError, match=r"is not the one that the report names|There is no document"):
            reports.read(digest_only, bad)
    kept = written(tmp_path, plain(bytes="kept"))
    report, evidence = reports.read(kept, right)
    assert (report, evidence) == (factories.report(), {report.sha256: right})
    with pytest.raises(InputError, match="--document"):
        reports.read(kept)
    with pytest.raises(InputError, match=r"size|not the one"):
        reports.read(written(tmp_path, plain(bytes="kept", size=3)), right)
    with pytest.raises(InputError, match="only where a license is named"):
        reports.read(written(tmp_path, plain(bytes="kept", license=" ")), right)


# ---------------------------------------------------------------- shown


def test_markup_in_any_text_is_escaped_and_reported_rows_stand_under_their_own_heading(
    archive: Archive, capsys: pytest.CaptureFixture[str]
) -> None:
    append_derived_run(archive, 0)
    append_outside(archive)
    texts = {name: f"{name} {HOSTILE}" for name in ("model", "policy", "says")}
    hostile = factories.report(
        title=HOSTILE, place=HOSTILE, license=HOSTILE, sha256="2" * 64, bytes="digest only", evidence=(), facts=(factories.fact(**texts),)
    )
    archive.append(hostile)
    document = queries.status(archive)
    html = templates().get_template("status.html").render(page=pages.status_page(document))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 6
    assert html.index('id="model-0"') < html.index('id="recipes"') < html.index('id="reported"')
    claims, reported = html.split('id="reported"')
    assert "Model A" not in claims and "Model A" in reported
    assert 'class="mark is-reported"' in reported and 'class="mark is-established"' not in reported.split('class="legend"')[0]
    assert "another document" in reported  # why one of them was withdrawn
    terminal.status(document)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert printed.index("RECIPES") < printed.index("REPORTED by documents outside; there is no evidence") < printed.index("Model A")


# ---------------------------------------------------------------- the one that ships


def test_the_report_that_ships_says_what_the_page_says_of_each_model() -> None:
    report, evidence = reports.read(SHIPPED)
    assert (report.bytes, report.license, evidence) == ("digest only", "", {})
    said = {(fact.model, fact.policy.split(",")[0], fact.scope): fact.outcome for fact in report.facts}
    assert said["Ministral-3-8B-Instruct-2512", "K16/V8", "quality.task"] == "bound not met"
    assert said["Ministral-3-8B-Instruct-2512", "K16/V8", "performance"] == "not measured"
    for model in ("Qwen3.5-9B", "Gemma-4-12B-it"):
        assert said[model, "native cache", "capability"] == "passes"
        assert said[model, "K16/V8", "capability"] == "unsupported"
    for policy in ("K16/V8", "symmetric FP8"):
        assert said["Qwen3.8-27B", policy, "quality.loss"] == "passes"
        assert said["Gemma 4 26B-A4B", policy, "quality.loss"] == "bound not met"
    assert said["recent architectures, as a whole", "K16/V8", "performance"] == "no benefit"


def test_the_report_that_ships_is_of_the_page_and_copies_no_sentence_of_it() -> None:
    place = os.environ.get("LEDGER_REPORTED")
    if not place:
        pytest.skip("LEDGER_REPORTED names no folder with recent-models.txt")
    page = Path(place) / "recent-models.txt"
    report, _ = reports.read(SHIPPED, page)
    assert digest.sha256(page.read_bytes()) == report.sha256
    words = " ".join(re.findall(r"\w+", page.read_text(encoding="utf-8").lower()))
    for fact in report.facts:
        said = re.findall(r"\w+", fact.says.lower())
        runs = {" ".join(said[at : at + 8]) for at in range(len(said) - 7)}
        assert not [run for run in runs if run in words], fact.says

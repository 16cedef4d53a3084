"""Page models and templates: every template renders with nothing undefined, and decides and computes nothing."""

from __future__ import annotations

import copy
import dataclasses
import math
import typing
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import jinja2.nodes
import pytest

import ledger
from ledger import queries, records
from ledger.archive import Archive
from ledger.errors import InputError
from ledger.web import pages, plots, precisionpage, runmodel, runpage, templates, words
from tests.web.examples import HOSTILE, Example

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Strict(HTMLParser):
    """Refuses a page whose elements do not nest, whose ids repeat, or whose anchors lead nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.anchors: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.attributes |= set(values)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("href", "aria-labelledby"):
            value = values.get(name) or ""
            if name == "aria-labelledby" or value.startswith("#"):
                self.anchors += [value.lstrip("#")] if value else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes |= set(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(html: str) -> Strict:
    parser = Strict()
    parser.feed(html)
    parser.close()
    assert not parser.open
    assert len(set(parser.ids)) == len(parser.ids)
    assert set(parser.anchors) <= set(parser.ids)
    return parser


@pytest.fixture(scope="module")
def documents(example: Example) -> dict[str, Any]:
    with Archive.open(example.folder) as archive:
        found: dict[str, Any] = {name: queries.run(archive, digest) for name, digest in example.runs.items()}
        found["status"], found["list"], found["log"] = queries.status(archive), queries.runs(archive), queries.log(archive)
        found["compare"] = queries.compare(archive, example.runs["good"], example.runs["ignored"])
    return found


def every_page(documents: dict[str, Any]) -> list[tuple[str, pages.Page]]:
    runs = [name for name in documents if name not in ("status", "list", "log", "compare")]
    return [
        ("status.html", pages.status_page(documents["status"])),
        ("status.html", pages.status_page({"rows": []})),
        ("runs.html", pages.runs_page(documents["list"])),
        ("runs.html", pages.runs_page([])),
        ("log.html", pages.log_page(documents["log"])),
        ("compare.html", pages.compare_page(documents["list"], documents["compare"], documents["good"]["id"], documents["ignored"]["id"])),
        ("compare.html", pages.compare_page([], None)),
        ("preview.html", pages.preview_page("log.txt", "0" * 64, 3, b"\xff<b>", True)),
        ("error.html", pages.error_page(404, InputError("Nothing is here.", expected="a", found="b", next="c"))),
        *(("run.html", runpage.run_page(documents[name])) for name in runs),
    ]


def test_every_template_renders_with_nothing_undefined_and_elements_that_nest(documents: dict[str, Any]) -> None:
    environment = templates()
    used = set()
    for name, page in every_page(documents):
        found = parsed(environment.get_template(name).render(page=page))
        assert not {"style", "onclick", "onerror", "onload"} & found.attributes
        used.add(name)
    shared = {"base.html", "macros.html", "shapes.html"}
    assert used | shared == {path.name for path in ledger.home("templates").glob("*.html")}


def test_templates_compute_nothing() -> None:
    environment = templates()
    assert environment.autoescape is True
    for path in ledger.home("templates").glob("*.html"):
        source = path.read_text(encoding="utf-8")
        tree = environment.parse(source)
        assert not list(tree.find_all(jinja2.nodes.Filter))
        assert not list(tree.find_all((jinja2.nodes.Add, jinja2.nodes.Sub, jinja2.nodes.Mul, jinja2.nodes.Div, jinja2.nodes.Concat)))
        assert not list(tree.find_all((jinja2.nodes.Assign, jinja2.nodes.MarkSafe)))
        assert "autoescape" not in source
        assert "| safe" not in source


def test_every_field_of_a_page_model_is_typed_and_frozen() -> None:
    for module in (words, plots, pages, precisionpage, runmodel):
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
                assert typing.get_type_hints(kind)


def test_every_word_of_the_vocabulary_has_a_meaning_and_looks_different() -> None:
    vocabulary = set(typing.get_args(records.Status))
    assert {mark.words for mark in words.legend()} == vocabulary
    shapes = (ledger.home("templates") / "shapes.html").read_text(encoding="utf-8").split("#}", 1)[1]
    drawn = {symbol.get("id"): ElementTree.tostring(symbol).split(b">", 1)[1] for symbol in ElementTree.fromstring(shapes).iter("symbol")}
    for outcome in (*words.MEANINGS, *words.OUTCOMES, *words.RECIPES):
        assert f"shape-{words.mark(outcome).shape}" in drawn
    assert len({drawn[f"shape-{mark.shape}"] for mark in words.legend()}) == len(vocabulary)
    assert len({mark.meaning for mark in words.legend()}) == len(vocabulary)
    assert words.mark("not established").meaning == "a bound was not met; no harm is shown"
    assert words.mark("no such word").shape == "unknown"


def test_synthetic_claims_say_so_beside_the_word() -> None:
    mark = words.mark("synthetic established")
    assert (mark.words, mark.shape, mark.synthetic) == ("established", "established", True)


@pytest.mark.parametrize(
    ("value", "unit", "text", "exact"),
    [
        (0, "count", "0", "0 count"),
        (0.0, "nats", "0", "0.0 nats"),
        ({"number": "-0.0"}, "nats", "\u22120", "-0.0 nats"),
        ({"number": "NaN"}, "nats", "NaN", "nan nats"),
        ({"number": "Infinity"}, "", "∞", "inf"),
        ({"number": "-Infinity"}, "", "\u2212∞", "-inf"),
        ({"number": "9007199254740993"}, "count", "9,007,199,254,740,993", "9,007,199,254,740,993 count"),
        (-0.00025312, "nats", "\u22120.0002531", "-0.00025312 nats"),
        (1.25e-9, "", "1.25e\u22129", "1.25e-09"),
        (98362432, "bytes", "93.81 MiB", "98,362,432 bytes"),
        (None, "bytes", "\u2013", "absent"),
        (True, "", "\u2013", "absent"),
    ],
)
def test_a_number_is_shown_short_and_kept_exact(value: Any, unit: str, text: str, exact: str) -> None:
    assert words.figure(value, unit) == words.Figure(text, exact)


@pytest.mark.parametrize(("values", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0\u20132"), ([5, 0, 1, 7, 6, 3], "0\u20131, 3, 5\u20137")])
def test_layers_are_told_as_ranges(values: list[int], text: str) -> None:
    assert words.ranges(values) == text


def test_a_gate_is_drawn_in_order_from_left_to_right() -> None:
    plot = plots.gate(0.01, 0.005, 0.015, 0.02, 0.05, 0.001)
    assert plot is not None
    assert plot.floor is not None and plot.zero is not None
    assert plots.LEFT <= plot.zero < plot.floor < plot.lower < plot.estimate < plot.upper < plot.bound < plot.harm <= plots.RIGHT
    assert math.isclose(plot.harm + plot.harm_width, plots.WIDTH)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf, None, 1e301])
def test_a_gate_without_finite_numbers_is_not_drawn(odd: float | None) -> None:
    assert plots.gate(odd, 0.0, 0.0, 0.1, 0.1, None) is None
    assert plots.gate(0.0, 0.0, odd, 0.1, 0.1, None) is None


def test_a_gate_of_zeros_is_drawn() -> None:
    assert plots.gate(0.0, 0.0, 0.0, 0.0, 0.0, 0.0) is not None


def test_a_contradiction_is_said_in_words_on_top_and_in_the_table(documents: dict[str, Any]) -> None:
    page = runpage.run_page(documents["ignored"])
    assert any("k8v8" in text and "requested fp8_e4m3, measured bf16" in text for text in page.alerts)
    arm = next(arm for arm in page.arms if arm.name == "k8v8")
    measured = next(row for row in arm.policy if row.side == "measured")
    assert [cell.text for cell in measured.cells if not cell.agrees] == ["bf16"]
    assert arm.contradictions


def test_a_killed_run_says_so_and_its_arms_are_not_run(documents: dict[str, Any]) -> None:
    page = runpage.run_page(documents["failed"])
    assert any("the runner was killed" in text for text in page.alerts)
    assert any("retracted" in text for text in page.alerts)
    assert {arm.mark.words for arm in page.arms} == {"not run"}
    assert {"peak memory of the run": "not measured", "stopped": "never: it was killed"}.items() <= {
        f.name: f.text for f in page.host
    }.items()


def test_a_backend_that_was_tried_often_is_told_once_and_its_refusal_in_brief(documents: dict[str, Any]) -> None:
    document = copy.deepcopy(documents["good"])
    accepted, refused = ({"name": "sdpa", "accepted": kind, "reason": "" if kind else "no kernel " * 400} for kind in (True, False))
    document["arms"][0]["backends"] = [accepted, refused, accepted, refused]
    told = next(fact.text for fact in runpage.run_page(document).arms[0].facts if fact.name == "backend")
    assert told.count("accepted") == told.count("refused") == 1
    assert len(told) < 400 and told.endswith("…")


def test_a_peak_of_zero_differs_from_an_absent_one(documents: dict[str, Any]) -> None:
    document = copy.deepcopy(documents["good"]) | {"peak_memory_bytes": 0}
    assert {fact.name: fact.text for fact in runpage.run_page(document).host}["peak memory of the run"] == "0 B (0 bytes)"


def test_the_page_shows_the_bounds_of_the_spec(documents: dict[str, Any]) -> None:
    page = runpage.run_page(documents["good"])
    loss = next(row for row in page.decisions if (row.candidate, row.baseline) == ("k16v8", "k16v16"))
    bounds = {
        gate["statistic"]: (gate["bound"], gate["harm"]) for family in documents["good"]["spec"]["families"] for gate in family["gates"]
    }
    assert [(gate.bound.exact, gate.harm.exact) for gate in loss.gates] == [
        tuple(words.figure(value).exact for value in bounds[gate.statistic]) for gate in loss.gates
    ]
    assert len(loss.gates) == 3


def test_tokenisation_stands_on_the_page_with_the_warning_about_it(documents: dict[str, Any]) -> None:
    page = runpage.run_page(documents["good"])
    facts = {fact.name: fact.text for fact in page.workload}
    assert facts["BOS"] == "none is put before a document"
    assert "split" in facts["special tokens"]
    assert {fact.name for fact in page.tokenizer} == {"class", "bos_token", "sha256"}
    assert page.warnings == ("The model declares a BOS, and no document begins with it.",)


def test_equal_layers_are_told_once(documents: dict[str, Any]) -> None:
    document = copy.deepcopy(documents["good"])
    layers = [
        {
            "layer": at,
            "kind": "sliding" if at % 3 else "attention",
            "kv_heads": 1,
            "key_dim": 256,
            "value_dim": 256,
            "window": 512 if at % 3 else None,
        }
        for at in range(6)
    ]
    for arm in document["arms"]:
        arm["geometry"] = {"declared": layers, "measured": layers}
    (row,) = runpage.run_page(document).geometry
    assert row.lines == (
        "layers 0, 3: attention, 1 KV head, dim 256",
        "layers 1\u20132, 4\u20135: sliding, 1 KV head, dim 256, window 512",
    )
    document["arms"][0]["geometry"] = {"declared": layers[:1], "measured": layers}
    assert [row.agrees for row in runpage.run_page(document).geometry] == [False, True]


def test_backings_are_summed_by_what_they_hold_and_shared_ones_say_so(documents: dict[str, Any]) -> None:
    document = copy.deepcopy(documents["good"])
    backing = document["arms"][0]["backings"][0]
    document["arms"] = document["arms"][:1]
    document["arms"][0]["backings"] = [backing | {"bytes": 4096, "layers": [0, 1, 2, 3]}, backing | {"bytes": 4096, "layers": [4]}]
    page = runpage.run_page(document)
    (row,) = page.sums
    assert (row.total.text, row.count, row.layers) == ("8.00 KiB", "2", "0\u20134 (up to 4 share one)")
    assert page.totals[0].exact == "8,192 bytes"


def test_a_hostile_name_is_text(documents: dict[str, Any]) -> None:
    html = templates().get_template("run.html").render(page=runpage.run_page(documents["hostile"]))
    assert HOSTILE not in html
    assert HOSTILE in "".join(parsed(html).text)


def test_relations_are_told_from_both_sides(documents: dict[str, Any]) -> None:
    kinds = {name: [row.kind for row in runpage.run_page(documents[name]).relations] for name in ("good", "again", "failed")}
    assert kinds == {"good": ["superseded by", "reproduced by"], "again": ["supersedes", "reproduces"], "failed": ["retracted"]}
    details = runpage.run_page(documents["good"]).relations[1].details
    assert details[0].text == "3.25 became nan: outside tolerance 0"


def test_synthetic_claims_are_never_counted_with_real_ones(documents: dict[str, Any]) -> None:
    page = pages.status_page(documents["status"])
    counts = {(tally.mark.synthetic, tally.mark.words): int(tally.count) for tally in page.tallies}
    claims = [row["claim"] for row in documents["status"]["rows"]]
    assert counts[False, "established"] == claims.count("established") > 0
    assert counts[True, "established"] == claims.count("synthetic established") > 0
    assert sum(counts.values()) == len(claims)

"""Recipes: what they may cite, how far they are supported, and that nothing passes from one model to another."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ledger import admission, digest, queries, recipes, records, terminal
from ledger.archive import Archive
from ledger.claims import checkpoint_id
from ledger.errors import InputError
from ledger.verify import verify
from ledger.web import pages, templates
from tests import factories
from tests.conftest import append_derived_run, append_run, claim_of, derived
from tests.ledger.test_archive import assert_whole

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "docs" / "recipes" / "smollm2-135m-instruct-k16v8.toml"
GIVEN = {digest.sha256(factories.LOCK): factories.LOCK}
REQUIREMENT = {"name": "msgspec", "version": "0.23.0", "sha256": ["ab" * 32]}


def claim(scope: str, status: str, synthetic: bool = False) -> dict[str, Any]:
    return {"key": "0123456789abcdef", "scope": scope, "status": status, "synthetic": synthetic}


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("claims", "word", "scopes"),
    [
        ([claim("quality.loss", "established")], "supported", ["quality.loss"]),
        ([claim("production", "passes"), claim("quality.loss", "established")], "supported", ["production", "quality.loss"]),
        ([claim("quality.loss", "established"), claim("performance", "measured")], "supported in part", ["quality.loss"]),
        ([claim("quality.loss", "established"), claim("performance", "measured, not qualified")], "supported in part", ["quality.loss"]),
        ([claim("quality.loss", "established"), claim("quality.loss", "not established")], "not supported", []),
        ([claim("quality.loss", "established"), claim("quality.task", "not established")], "supported in part", ["quality.loss"]),
        ([claim("quality.loss", "established"), claim("quality.task", "degraded")], "not supported", []),
        ([claim("quality.loss", "established"), claim("production", "fails")], "not supported", []),
        ([claim("quality.loss", "not established")], "not supported", []),
        ([claim("quality.loss", "unsupported")], "not supported", []),
        ([claim("quality.loss", "invalid")], "not supported", []),
        ([claim("performance", "measured")], "not supported", []),
        ([claim("quality.loss", "established"), claim("production", "retracted")], "lapsed", []),
        ([claim("quality.loss", "degraded"), claim("production", "retracted")], "lapsed", []),
        ([claim("quality.loss", "established", True)], "synthetic supported", ["quality.loss"]),
        ([claim("quality.loss", "retracted", True)], "synthetic lapsed", []),
        ([], "not supported", []),
    ],
    ids=str,
)
def test_a_recipe_is_supported_exactly_as_far_as_its_claims_reach(claims: list[Any], word: str, scopes: list[str]) -> None:
    found = recipes.judge(claims)
    assert (found.word, list(found.scopes)) == (word, scopes)
    assert found.reason
    assert word.removeprefix("synthetic ") in recipes.WORDS
    assert recipes.judge(claims, "retracted by A: B") == recipes.Verdict("retracted", (), "retracted by A: B")


# ---------------------------------------------------------------- recording


def shown(archive: Archive, name: str) -> dict[str, Any]:
    return next(item for item in queries.recipes_of(archive) if item["recipe"] == name)


def retract(archive: Archive, run: str) -> None:
    archive.append(records.Retract(format="kv-ledger/retract/1", run=run, author="A", reason="a wrong text"))


def append_good_run(archive: Archive, seed: int = 0, **changes: Any) -> str:
    """A run whose K16/V8 is established; its digest."""
    frozen = factories.spec(**changes)
    files = factories.samples(frozen, seed)
    return append_run(archive, seed, frozen, **derived(frozen, factories.result(frozen, files), files)).record


def test_a_recipe_follows_its_claims_verifies_and_is_made_again(archive: Archive, database_url: str | None) -> None:
    run = append_good_run(archive)
    key = claim_of(archive)
    name = archive.append(factories.recipe((key,)), GIVEN).record
    found = shown(archive, name)
    assert (found["word"], found["scopes"], found["model"]) == ("supported", ["quality.loss"], "Toy-1M")
    assert found["claims"] == [row for row in queries.status(archive)["rows"] if row["key"] == key]
    assert [row["key"] for row in found["beside"]] == [claim_of(archive, "k16v8", "k8v8")]
    assert found["lock"] == {"name": "toy.lock", "sha256": digest.sha256(factories.LOCK), "size": len(factories.LOCK)}
    assert queries.status(archive)["recipes"] == [found]
    assert queries.log(archive)["entries"][-1]["says"] == "recipe toy-k16v8: The toy model with cheap values"
    assert_whole(archive)
    assert verify(archive.folder, database_url).findings == []
    archive.rebuild()
    assert shown(archive, name) == found
    retract(archive, run)
    lapsed = shown(archive, name)
    assert (lapsed["word"], lapsed["scopes"], [row["status"] for row in lapsed["claims"]]) == ("lapsed", [], ["retracted"])
    assert key[:12] in lapsed["reason"]
    assert verify(archive.folder, database_url).findings == []


def test_a_recipe_lapses_where_a_run_of_other_bounds_supersedes_its_only_run_and_stands_where_another_run_counts(archive: Archive) -> None:
    first, second = append_good_run(archive), append_good_run(archive, 1)
    name = archive.append(factories.recipe((claim_of(archive),)), GIVEN).record
    retract(archive, second)
    assert shown(archive, name)["word"] == "supported"
    wider = tuple(
        msgspec.structs.replace(family, gates=tuple(msgspec.structs.replace(gate, harm=gate.harm * 2) for gate in family.gates))
        for family in factories.FAMILIES
        if family.name == "loss"
    )
    other = append_good_run(archive, 2, families=wider, contrasts=tuple(item for item in factories.CONTRASTS if item.family == "loss"))
    archive.append(records.Supersede(format="kv-ledger/supersede/1", run=first, by=other, author="A", reason="another margin of harm"))
    assert shown(archive, name)["word"] == "lapsed"


def test_a_recipe_twice_is_once_and_another_of_its_name_is_refused_until_it_is_retracted(archive: Archive) -> None:
    append_derived_run(archive, 0)
    recipe = factories.recipe((claim_of(archive),))
    first = archive.append(recipe, GIVEN)
    assert archive.append(recipe, GIVEN) == first
    other = msgspec.structs.replace(recipe, title="Another way")
    with pytest.raises(InputError, match=r"(?s)of that name is recorded already.*ledger retract"):
        archive.append(other)
    archive.append(records.Retract(format="kv-ledger/retract/2", record=first.record, author="A", reason="a wrong step"))
    archive.append(other)
    assert [item["word"] for item in queries.recipes_of(archive)] == ["retracted", "supported"]
    assert queries.recipes_of(archive)[0]["reason"] == "retracted by A: a wrong step"
    assert_whole(archive)


def test_a_recipe_may_not_cite_what_is_not_there_or_is_of_another_model_or_policy(archive: Archive) -> None:
    append_derived_run(archive, 0)
    other = factories.checkpoint(files=(records.CheckpointFile(path="other.safetensors", sha256="1" * 64, size=11),))
    foreign = factories.spec(study="other", checkpoint=other)
    append_run(archive, 0, foreign)
    theirs = next(
        row["key"] for row in queries.status(archive)["rows"] if row["checkpoint"] == checkpoint_id(other) and "k16v8:" in row["arm"]
    )
    archive.append(factories.spec(study="later", workload=factories.workload(5)))
    frozen = next(
        row["key"] for row in queries.status(archive)["rows"] if row["status"] == "not measured" and row["arm"].startswith("k16v8:")
    )
    size = archive.head.size
    good = claim_of(archive)
    for claims, said in (
        (("0" * 64,), "not in this archive"),
        ((good, frozen), "comes of no run"),
        ((good, theirs), "is on checkpoint"),
        ((claim_of(archive, "k8v8"),), "keys: fp8_e4m3, the recipe has bf16"),
        ((claim_of(archive, "own-fp32", "native"),), "another policy"),
    ):
        with pytest.raises(InputError, match=said):
            archive.append(factories.recipe(claims), GIVEN)
    with pytest.raises(InputError, match="is on checkpoint"):
        archive.append(factories.recipe((good,), checkpoint=checkpoint_id(other)), GIVEN)
    with pytest.raises(InputError, match="another policy"):
        archive.append(factories.recipe((good,), policy=msgspec.structs.replace(factories.policy(), implementation="fused")), GIVEN)
    assert archive.head.size == size
    assert_whole(archive)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"claims": ("0" * 64,)}, "not in this archive"),
        ({"checkpoint": "0" * 64}, "is on checkpoint"),
        ({"policy": factories.policy("k8v8")}, "another policy"),
    ],
    ids=str,
)
def test_a_recipe_that_was_let_in_against_the_rule_is_found(
    make_archive: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    archive = make_archive()
    append_derived_run(archive, 0)
    recipe = factories.recipe((claim_of(archive),), **{name: value for name, value in change.items() if name != "claims"})
    monkeypatch.setattr(admission, "_check_outside", lambda connection, record: None)
    name = archive.append(msgspec.structs.replace(recipe, **change), GIVEN).record
    (finding,) = verify(archive.folder).findings
    assert (finding.kind, finding.object) == ("reference", name)
    assert said in finding.detail


def test_a_recipe_that_stands_before_the_run_that_it_cites_is_found(
    make_archive: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_archive("model")
    append_derived_run(model, 0)
    archive = make_archive()
    monkeypatch.setattr(admission, "_check_outside", lambda connection, record: None)
    archive.append(factories.recipe((claim_of(model),)), GIVEN)
    append_derived_run(archive, 0)
    assert {finding.kind for finding in verify(archive.folder).findings} == {"reference"}


def test_a_lock_that_was_changed_or_lost_is_found(archive: Archive, database_url: str | None) -> None:
    append_derived_run(archive, 0)
    name = archive.append(factories.recipe((claim_of(archive),)), GIVEN).record
    path = archive.store.object_path(digest.sha256(factories.LOCK))
    path.write_bytes(b"X" + factories.LOCK[1:])
    (finding,) = verify(archive.folder, database_url).findings
    assert (finding.kind, f"toy.lock of recipe {name}" in finding.detail) == ("object_changed", True)
    path.unlink()
    (finding,) = verify(archive.folder, database_url).findings
    assert finding.kind == "object_missing"


def test_on_altered_weights_the_word_says_so(make_archive: Callable[..., Archive]) -> None:
    archive = make_archive()
    altered = factories.checkpoint(alteration=records.RescaledKeys(pairs=(0,), exponent=6))
    append_good_run(archive, checkpoint=altered)
    name = archive.append(factories.recipe((claim_of(archive),), checkpoint=checkpoint_id(altered)), GIVEN).record
    assert shown(archive, name)["word"] == "synthetic supported"
    page = pages.status_page(queries.status(archive))
    assert (page.recipes[0].mark.words, page.recipes[0].mark.synthetic) == ("supported", True)


def test_markup_in_any_text_is_escaped(archive: Archive, capsys: pytest.CaptureFixture[str]) -> None:
    append_derived_run(archive, 0)
    hostile = "</code><script>document.title='owned'</script>\x1b[2J"
    archive.append(factories.recipe((claim_of(archive),), title=hostile, steps=(hostile,)), GIVEN)
    document = queries.status(archive)
    html = templates().get_template("status.html").render(page=pages.status_page(document))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 2
    terminal.recipes(document["recipes"])
    assert "\x1b" not in capsys.readouterr().out


# ---------------------------------------------------------------- files


def plain(**changes: Any) -> dict[str, Any]:
    """A recipe as a file has it."""
    found = records.plain(factories.recipe(("0" * 64,)))
    for name in ("format", "evidence", "requirements"):
        del found[name]
    found |= {"lock": "toy.lock", "lock_sha256": digest.sha256(factories.LOCK), **changes}
    return {name: value for name, value in found.items() if value is not None}


def written(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "toy.lock").write_bytes(factories.LOCK)
    (folder / "recipe.json").write_text(json.dumps(content))
    return folder / "recipe.json"


def test_a_recipe_is_read_with_its_lock_or_with_pinned_requirements(tmp_path: Path) -> None:
    assert recipes.read(written(tmp_path, plain())) == (factories.recipe(("0" * 64,)), GIVEN)
    recipe, evidence = recipes.read(written(tmp_path, plain(lock=None, lock_sha256=None, requirements=[REQUIREMENT])))
    assert (recipe.requirements[0].version, recipe.evidence, evidence) == ("0.23.0", (), {})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"surprise": 1}, "surprise"),
        ({"status": "supported"}, "status"),
        ({"name": "Toy"}, "name"),
        ({"title": " "}, "title"),
        ({"title": "x" * (3 << 20)}, "at most 8192 characters"),
        ({"checkpoint": "Toy-1M"}, "checkpoint"),
        ({"policy": {}}, "policy"),
        ({"policy": {**records.plain(factories.policy()), "keys": "int4"}}, "policy.keys"),
        ({"steps": []}, "steps"),
        ({"claims": []}, "claims"),
        ({"claims": ["0" * 12]}, "claims"),
        ({"claims": ["0" * 64, "0" * 64]}, "a claim stands twice"),
        ({"lock": None}, "both lock and lock_sha256"),
        ({"lock_sha256": None}, "both lock and lock_sha256"),
        ({"lock_sha256": "0" * 64}, "is not the one that the recipe names"),
        ({"lock": "nothing.lock"}, "There is no lock file"),
        ({"lock": "a\0b"}, "There is no lock file"),
        ({"lock": None, "lock_sha256": None}, "exactly one of the two"),
        ({"requirements": [REQUIREMENT]}, "exactly one of the two"),
        ({"lock": None, "lock_sha256": None, "requirements": [{**REQUIREMENT, "sha256": []}]}, "sha256"),
        ({"lock": None, "lock_sha256": None, "requirements": [{**REQUIREMENT, "version": ">=1"}]}, "version"),
        (
            {"lock": None, "lock_sha256": None, "requirements": [REQUIREMENT, {**REQUIREMENT, "name": "MSGSPEC"}]},
            "a requirement stands twice",
        ),
        ({"evidence": []}, "not its own to give: evidence"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_recipe_that_is_wrong_is_refused_and_says_where(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        recipes.read(written(tmp_path, plain(**change)))


def test_an_empty_lock_pins_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, plain(lock_sha256=digest.sha256(b"\n")))
    (tmp_path / "toy.lock").write_bytes(b"\n")
    with pytest.raises(InputError, match="not empty"):
        recipes.read(path)


# ---------------------------------------------------------------- the one that ships


def test_the_recipe_that_ships_is_supported_by_the_archive_that_ships_until_its_runs_are_withdrawn(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    shutil.copytree(ROOT / "evidence", folder, ignore=shutil.ignore_patterns("ledger.db*"))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    recipe, evidence = recipes.read(SHIPPED)
    with Archive.open(folder, write=True) as archive:
        (already,) = [item["recipe"] for item in queries.recipes_of(archive) if item["name"] == recipe.name] or [None]
        assert already in (None, records.identify(recipe))
        name = archive.append(recipe, evidence).record
        found = shown(archive, name)
        assert (found["word"], found["scopes"], found["model"]) == ("supported", ["quality.loss"], "SmolLM2-135M-Instruct (Q4_1)")
        assert {row["claim"] for row in found["claims"]} == {"established"}
        assert verify(folder).findings == []
        for run in found["claims"][0]["runs"]:
            retract(archive, run)
        assert shown(archive, name)["word"] == "lapsed"
        assert verify(folder).findings == []


def test_the_lock_of_the_recipe_that_ships_pins_every_line() -> None:
    lines = SHIPPED.with_suffix(".lock").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert pinned
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in pinned)

"""Facts about the harness, from real repositories made on the spot."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import provenance, records
from ledger.errors import ProvenanceError
from ledger.repository import public_url

ONE = b"one = 1\n"
TWO = b"two = 2\n"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SOURCES = {"ledger/__init__.py": sha(b""), "ledger/one.py": sha(ONE), "runners/two.py": sha(TWO)}
PACKAGES = {"ledger/__init__.py": b"", "ledger/one.py": ONE, "runners/two.py": TWO}


@pytest.fixture(autouse=True)
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git identity, and no configuration but the repository's own."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Test")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "test@example.org")
        monkeypatch.setenv(f"GIT_{role}_DATE", "2026-01-01T00:00:00Z")
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    (tmp_path / "gitconfig").write_text('[init]\n\tdefaultBranch = main\n[protocol "file"]\n\tallow = always\n')


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(folder: Path, message: str = "Change") -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, {**PACKAGES, ".gitignore": b"*.pyc\n"})
    commit(folder, "First")
    return folder


def test_a_clean_tree_matches_its_head(repository: Path) -> None:
    found, evidence = provenance.harness(repository / "ledger", SOURCES)
    assert (found.matched, found.commit, found.state) == ("commit", git(repository, "rev-parse", "HEAD"), "clean")
    assert (found.detail, found.diff, found.untracked, evidence) == ("", None, {}, {})
    assert found.revision == found.commit


def test_a_result_made_earlier_matches_the_commit_that_held_its_sources(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    write(repository, {"ledger/one.py": b"one = 11\n"})
    head = commit(repository)
    found, _ = provenance.harness(repository, SOURCES)
    assert (found.matched, found.commit, found.state) == ("commit", first, "clean")
    assert head in found.detail


def test_a_head_that_touches_no_source_still_matches(repository: Path) -> None:
    write(repository, {"README.md": b"words\n"})
    head = commit(repository)
    assert provenance.harness(repository, SOURCES)[0].commit == head


def test_a_commit_on_another_branch_is_found(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "other")
    write(repository, {"ledger/one.py": b"other\n"})
    other = commit(repository)
    git(repository, "checkout", "-q", "main")
    assert provenance.harness(repository, {**SOURCES, "ledger/one.py": sha(b"other\n")})[0].commit == other


def test_a_side_branch_that_a_merge_dropped_is_found(repository: Path) -> None:
    git(repository, "checkout", "-q", "-b", "side")
    write(repository, {"ledger/one.py": b"side\n"})
    side = commit(repository)
    git(repository, "checkout", "-q", "main")
    git(repository, "merge", "-q", "-s", "ours", "--no-edit", "side")
    git(repository, "branch", "-q", "-D", "side")
    assert provenance.harness(repository, {**SOURCES, "ledger/one.py": sha(b"side\n")})[0].commit == side


def test_sources_that_no_commit_holds_are_recorded_and_match_nothing(repository: Path) -> None:
    write(repository, {"ledger/one.py": b"one = 1.5\n"})
    found, evidence = provenance.harness(repository, {**SOURCES, "ledger/one.py": sha(b"one = 1.5\n")})
    assert (found.matched, found.commit, found.state, found.revision) == ("none", None, "dirty", "unmatched")
    assert found.diff == "harness/diff.patch"
    assert b"+one = 1.5" in evidence["harness/diff.patch"]


def test_two_commits_that_each_hold_half_do_not_match(repository: Path) -> None:
    write(repository, {"ledger/one.py": b"x\n", "runners/two.py": b"y\n"})
    commit(repository)
    assert provenance.harness(repository, {"ledger/one.py": sha(ONE), "runners/two.py": sha(b"y\n")})[0].matched == "none"


@pytest.mark.parametrize("sources", [{}, {"../etc/passwd": sha(b"")}, {"/ledger/one.py": sha(ONE)}, {":(top)ledger": sha(ONE)}])
def test_no_source_or_a_strange_one_matches_nothing(repository: Path, sources: dict[str, str]) -> None:
    found, _ = provenance.harness(repository, sources)
    assert found.matched == "none"
    assert "source" in found.detail


def test_a_symbolic_link_to_the_bytes_is_not_the_source(repository: Path) -> None:
    (repository / "ledger/one.py").rename(repository / "ledger/real.py")
    (repository / "ledger/one.py").symlink_to("real.py")
    commit(repository)
    (repository / ".git/HEAD").write_text(git(repository, "rev-parse", "HEAD"))
    git(repository, "branch", "-q", "-D", "main")
    link = {"ledger/one.py": sha(b"real.py")}
    assert provenance.harness(repository, link)[0].matched == "none"


def test_staged_unstaged_and_untracked_changes_are_recorded(repository: Path) -> None:
    write(repository, {"ledger/one.py": b"staged\n"})
    git(repository, "add", "-A")
    write(repository, {"runners/two.py": b"unstaged\n", "ledger/new.py": b"new\n", "notes.txt": b"private\n", "ledger/x.pyc": b"ignored"})
    found, evidence = provenance.harness(repository, SOURCES)
    assert (found.matched, found.state) == ("commit", "dirty")
    assert found.untracked == {"ledger/new.py": sha(b"new\n"), "notes.txt": sha(b"private\n")}
    assert evidence["harness/untracked/ledger/new.py"] == b"new\n"
    assert set(evidence) == {"harness/diff.patch", "harness/untracked/ledger/new.py"}
    assert b"+staged" in evidence["harness/diff.patch"] and b"+unstaged" in evidence["harness/diff.patch"]


def test_the_diff_gives_the_tree_back(repository: Path, tmp_path: Path) -> None:
    write(repository, {"ledger/one.py": bytes(range(256)), "runners/two.py": b"no newline"})
    (repository / ".gitattributes").write_text("*.py diff=odd\n")
    git(repository, "config", "diff.odd.textconv", "echo converted")
    git(repository, "config", "diff.noprefix", "true")
    git(repository, "config", "color.ui", "always")
    _, evidence = provenance.harness(repository, SOURCES)
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(repository), str(clone))
    (tmp_path / "diff").write_bytes(evidence["harness/diff.patch"])
    git(clone, "apply", str(tmp_path / "diff"))
    assert (clone / "ledger/one.py").read_bytes() == bytes(range(256))
    assert (clone / "runners/two.py").read_bytes() == b"no newline"


def test_the_archives_own_folder_does_not_count(repository: Path) -> None:
    write(repository, {"evidence/log/0.json": b"{}"})
    commit(repository)
    write(repository, {"evidence/log/0.json": b"{1}", "evidence/log/1.json": b"{}"})
    assert provenance.harness(repository, SOURCES)[0].state == "dirty"
    found, evidence = provenance.harness(repository, SOURCES, exclude=repository / "evidence")
    assert (found.state, evidence) == ("clean", {})
    assert provenance.harness(repository, SOURCES, exclude=repository)[0].state == "dirty"
    assert provenance.harness(repository, SOURCES, exclude=repository.parent / "elsewhere")[0].state == "dirty"


def test_an_archive_whose_name_is_a_pattern_excludes_itself_alone(repository: Path) -> None:
    write(repository, {"e[v]*/a": b"1", "evidence/a": b"1"})
    found, _ = provenance.harness(repository, SOURCES, exclude=repository / "e[v]*")
    assert set(found.untracked) == {"evidence/a"}


def test_paths_that_are_not_utf_8_are_recorded_escaped(repository: Path) -> None:
    (repository / os.fsdecode(b"ledger/caf\xe9.py")).write_bytes(b"coffee\n")
    write(repository, {"ledger/caf\\xe9.py": b"a backslash\n", "ledger/naïve 1.py": b"spaces\n"})
    found, evidence = provenance.harness(repository, SOURCES)
    assert found.untracked == {
        "ledger/caf\\xe9.py": sha(b"coffee\n"),
        "ledger/caf\\\\xe9.py": sha(b"a backslash\n"),
        "ledger/naïve 1.py": sha(b"spaces\n"),
    }
    assert evidence == {}
    git(repository, "add", "-A")
    found, evidence = provenance.harness(repository, SOURCES)
    assert found.state == "dirty" and b"coffee" in evidence["harness/diff.patch"]
    records.encode(found)


def test_a_single_untracked_file_called_number_can_be_recorded(repository: Path) -> None:
    write(repository, {"number": b"7"})
    found, _ = provenance.harness(repository, SOURCES)
    assert records.decode(records.Harness, records.encode(found), "harness") == found


def test_an_untracked_link_is_not_followed_and_a_nested_repository_is_not_read(repository: Path, tmp_path: Path) -> None:
    write(tmp_path, {"secret": b"secret\n"})
    (repository / "ledger/link.py").symlink_to(tmp_path / "secret")
    (repository / "nested").mkdir()
    git(repository / "nested", "init", "-q")
    write(repository, {"nested/file": b"x"})
    commit(repository / "nested")
    found, evidence = provenance.harness(repository, SOURCES)
    assert evidence == {} and sha(b"secret\n") not in found.untracked.values()
    assert "nested/" in found.detail


def test_an_untracked_source_whose_name_begins_with_an_underscore_is_kept(repository: Path) -> None:
    write(repository, {"runners/__main__.py": b"main\n", "ledger/_draft/one.py": b"draft\n", "ledger/-x.py": b"no path\n"})
    found, evidence = provenance.harness(repository, SOURCES)
    kept = {"harness/untracked/runners/__main__.py": b"main\n", "harness/untracked/ledger/_draft/one.py": b"draft\n"}
    assert evidence == kept  # every name that a record can hold, and no other
    assert set(found.untracked) == {"runners/__main__.py", "ledger/_draft/one.py", "ledger/-x.py"}


def test_a_large_diff_is_recorded_by_digest_alone(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_DIFF", 10)
    write(repository, {"ledger/one.py": b"changed\n"})
    found, evidence = provenance.harness(repository, SOURCES)
    assert (found.state, found.diff, evidence) == ("dirty", None, {})
    assert "SHA-256" in found.detail


def test_a_detached_head_is_said(repository: Path) -> None:
    git(repository, "checkout", "-q", "--detach")
    found, _ = provenance.harness(repository, SOURCES)
    assert (found.matched, found.detail) == ("commit", "detached HEAD")


def test_a_shallow_clone_says_where_the_search_ended(repository: Path, tmp_path: Path) -> None:
    write(repository, {"ledger/one.py": b"later\n"})
    head = commit(repository)
    clone = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", str(clone))
    found, _ = provenance.harness(clone, SOURCES)
    assert found.matched == "none" and "git fetch --unshallow" in found.detail
    now, _ = provenance.harness(clone, {**SOURCES, "ledger/one.py": sha(b"later\n")})
    assert (now.commit, now.detail, now.repository) == (head, "shallow clone", None)


def test_the_search_is_bounded_and_says_so(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MAX_COMMITS", 2)
    for number in range(3):
        write(repository, {"ledger/one.py": b"%d\n" % number})
        commit(repository)
    assert "after 2 commits" in provenance.harness(repository, SOURCES)[0].detail


def test_a_linked_worktree_is_described_by_itself(repository: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    git(repository, "worktree", "add", "-q", "-b", "linked", str(linked))
    write(repository, {"ledger/one.py": b"the main tree is dirty\n"})
    found, _ = provenance.harness(linked, SOURCES)
    assert (found.matched, found.state, found.detail) == ("commit", "clean", "linked worktree")


def test_a_submodule_is_its_own_harness(repository: Path, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "--quiet", "add", str(repository), "vendor")
    commit(outer)
    found, _ = provenance.harness(outer / "vendor", SOURCES)
    assert (found.commit, found.state, found.detail) == (git(repository, "rev-parse", "HEAD"), "clean", "submodule")


def test_no_repository_is_recorded(tmp_path: Path) -> None:
    found, evidence = provenance.harness(tmp_path, SOURCES)
    assert (found.matched, found.state, found.detail, evidence) == ("none", "none", "no repository", {})


def test_a_machine_without_git_is_recorded_as_such(repository: Path) -> None:
    code = (
        "from pathlib import Path; from ledger import errors, provenance\n"
        f"print(provenance.harness(Path({str(repository)!r}), {SOURCES!r})[0].detail)\n"
        "try:\n"
        f"    provenance.worktree(Path({str(repository)!r}), '0' * 40, Path('x')).__enter__()\n"
        "except errors.ProvenanceError as error:\n"
        "    print(error.found)"
    )
    root = Path(provenance.__file__).parent.parent
    environment = {**os.environ, "PATH": str(repository)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, env=environment, check=True)
    assert done.stdout.splitlines() == ["git is not installed", "git is not installed"]


def test_a_repository_without_commits_is_dirty_and_matches_nothing(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, PACKAGES)
    git(tmp_path, "add", "ledger")
    found, evidence = provenance.harness(tmp_path, SOURCES)
    assert (found.matched, found.state) == ("none", "dirty")
    assert "no commits yet" in found.detail
    assert b"+one = 1" in evidence["harness/diff.patch"]
    assert evidence["harness/untracked/runners/two.py"] == TWO


def test_somebody_elses_repository_is_not_recorded(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    write(tmp_path, {"secret.txt": b"x"})
    commit(tmp_path)
    git(tmp_path, "remote", "add", "origin", "https://example.org/private.git")
    write(tmp_path, {"other.txt": b"x"})
    found, evidence = provenance.harness(tmp_path, SOURCES)
    assert (found.repository, found.state, found.untracked, evidence) == (None, "none", {}, {})
    assert "none of the sources" in found.detail


def test_a_bare_repository_has_no_working_tree(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--bare", str(repository), "bare.git")
    assert "working tree" in provenance.harness(tmp_path / "bare.git", SOURCES)[0].detail


def test_dubious_ownership_names_the_command(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own switch for its own tests
    with pytest.raises(ProvenanceError, match=r"git config --global --add safe\.directory"):
        provenance.harness(repository, SOURCES)
    git(repository, "config", "--global", "--add", "safe.directory", str(repository))
    assert provenance.harness(repository, SOURCES)[0].matched == "commit"


def test_the_environment_of_git_does_not_mislead(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other, {"x": b"x"})
    commit(other)
    head = git(repository, "rev-parse", "HEAD")
    for name, value in {
        "GIT_DIR": other / ".git",
        "GIT_WORK_TREE": other,
        "GIT_INDEX_FILE": other / ".git/index",
        "GIT_OBJECT_DIRECTORY": other / ".git/objects",
        "GIT_EXTERNAL_DIFF": "false",
        "GIT_CEILING_DIRECTORIES": tmp_path,
    }.items():
        monkeypatch.setenv(name, str(value))
    before = dict(os.environ)
    found, _ = provenance.harness(repository / "ledger", SOURCES)
    assert (found.commit, found.state) == (head, "clean")
    assert dict(os.environ) == before


def test_a_replaced_commit_does_not_mislead(repository: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    write(repository, {"ledger/one.py": b"later\n"})
    head = commit(repository)
    git(repository, "replace", head, first)
    assert provenance.harness(repository, SOURCES)[0].commit == first


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://user:secret@example.org:8443/a/b.git", "https://example.org:8443/a/b.git"),
        ("https://token@example.org/a/b?private_token=x#y", "https://example.org/a/b"),
        ("https://user:p@ss@example.org/a", "https://example.org/a"),
        ("ssh://git@example.org/a/b.git", "ssh://example.org/a/b.git"),
        ("git@example.org:a/b.git", "ssh://example.org/a/b.git"),
        ("http://[::1]:80/a", "http://[::1]:80/a"),
        ("https://example.org:notaport/a", None),
        ("/srv/git/a.git", None),
        ("../a.git", None),
        ("C:/code/a.git", None),
        ("file:///srv/git/a.git", None),
        ("ext::sh -c evil", None),
        ("", None),
    ],
)
def test_a_remotes_url_is_recorded_without_credentials_or_local_paths(repository: Path, url: str, expected: str | None) -> None:
    assert public_url(url) == expected
    if url:
        git(repository, "remote", "add", "origin", "--", url)
        assert provenance.harness(repository, SOURCES)[0].repository == expected


def distribution(site: Path, files: dict[str, bytes], record: bool = True) -> bytes:
    """An installed distribution as pip leaves it."""
    info = "kv_evidence_ledger-9.9.dist-info"
    files = {**files, f"{info}/METADATA": b"Metadata-Version: 2.1\nName: kv-evidence-ledger\nVersion: 9.9\n"}
    write(site, files)
    lines = []
    for name, data in files.items():
        value = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={value},{len(data)}\r\n")
    text = ("".join(lines) + f"{info}/RECORD,,\r\n").encode()
    if record:
        write(site, {f"{info}/RECORD": text})
    return text


def test_an_installed_distribution_matches_by_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = distribution(tmp_path / "site", PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found, _ = provenance.harness(tmp_path, SOURCES)
    assert (found.matched, found.revision) == ("distribution", "kv-evidence-ledger==9.9")
    assert found.distribution is not None and found.distribution.record_sha256 == sha(record)
    assert b"\r\n" in record and provenance.installed() == found.distribution
    assert provenance.harness(tmp_path, {**SOURCES, "ledger/one.py": sha(b"edited")})[0].matched == "none"
    assert provenance.harness(tmp_path, {**SOURCES, "ledger/three.py": sha(b"")})[0].matched == "none"
    assert provenance.harness(tmp_path, {})[0].matched == "none"


def test_a_commit_is_preferred_to_a_distribution(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path / "site", PACKAGES)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found, _ = provenance.harness(repository, SOURCES)
    assert (found.matched, found.distribution) == ("commit", None)


def test_a_distribution_without_a_record_matches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path / "site", {"ledger/one.py": ONE}, record=False)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert provenance.harness(tmp_path, {"ledger/one.py": sha(ONE)})[0].matched == "none"
    assert provenance.installed() is None


def test_a_worktree_holds_the_commit_and_is_removed(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    hook = repository / ".git/hooks/post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
    hook.chmod(0o755)
    write(repository, {"ledger/one.py": b"later\n"})
    commit(repository)
    with provenance.worktree(repository, first, tmp_path / "wt") as folder:
        assert (folder / "ledger/one.py").read_bytes() == ONE
        write(folder, {"left/behind": b"x"})
    assert not (tmp_path / "wt").exists() and not (tmp_path / "hook-ran").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert git(repository, "branch", "--list") == "* main"


def test_a_worktree_is_removed_after_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), provenance.worktree(repository, git(repository, "rev-parse", "HEAD"), tmp_path / "wt"):
        raise KeyboardInterrupt
    assert not (tmp_path / "wt").exists()


def test_a_worktree_that_git_cannot_remove_goes_all_the_same(repository: Path, tmp_path: Path) -> None:
    with provenance.worktree(repository, git(repository, "rev-parse", "HEAD"), tmp_path / "wt") as folder:
        (folder / ".git").write_text("gitdir: nowhere\n")
    assert not (tmp_path / "wt").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_a_worktree_of_a_missing_commit_says_what_to_do(repository: Path, tmp_path: Path) -> None:
    cases = {"0" * 40: "does not hold", "main": "full commit id", git(repository, "rev-parse", "--short", "HEAD"): "full commit id"}
    for name, words in cases.items():
        with pytest.raises(ProvenanceError, match=words), provenance.worktree(repository, name, tmp_path / "wt"):
            pass
    with pytest.raises(ProvenanceError, match="current-harness"), provenance.worktree(tmp_path, "0" * 40, tmp_path / "wt"):
        pass
    (tmp_path / "full").mkdir()
    write(tmp_path, {"full/x": b""})
    head = git(repository, "rev-parse", "HEAD")
    with pytest.raises(ProvenanceError, match="not empty"), provenance.worktree(repository, head, tmp_path / "full"):
        pass


def test_the_sources_of_this_very_package_are_found_where_they_were_committed(tmp_path: Path) -> None:
    package = Path(provenance.__file__).parent
    git(tmp_path, "init", "-q")
    files = {f"ledger/{path.name}": path.read_bytes() for path in package.glob("*.py")}
    write(tmp_path, files)
    head = commit(tmp_path)
    found, _ = provenance.harness(tmp_path, {name: sha(data) for name, data in files.items()})
    assert (found.matched, found.commit, found.detail) == ("commit", head, "")

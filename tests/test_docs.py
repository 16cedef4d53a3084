"""The README documents every command and every make target; the code on the pages runs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ledger import cli, digest, freezing

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = sorted(str(found.name) for found in cli.app.registered_commands)
TARGETS = sorted(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_documents_the_command(readme, name):
    assert re.search(rf"(ledger (--\w+ \S+ )*{re.escape(name)}|`{re.escape(name)}|^{re.escape(name)})\b", readme, re.MULTILINE)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "help"])
def test_the_readme_documents_the_make_target(readme, name):
    assert re.search(rf"make {name}\b", readme)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options(name):
    found = next(item for item in cli.app.registered_commands if item.name == name)
    assert found.callback is not None and (found.callback.__doc__ or "").strip().endswith(".")


def test_the_readme_names_every_exit_status(readme):
    for status in ("0", "1", "2", "3", "4"):
        assert re.search(rf"`{status}`|\| *{status} *\|", readme)


def blocks(page, language):
    """The code blocks of a page in that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.M | re.S)


def test_the_script_of_the_formats_page_checks_the_archive_that_ships(tmp_path):
    (script,) = blocks("formats.md", "python")
    done = subprocess.run([sys.executable, "-I", "-c", script, str(ROOT / "evidence")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("head: ")
    shutil.copytree(ROOT / "evidence", tmp_path / "copy")
    one = next(path for path in (tmp_path / "copy/objects").rglob("*") if path.is_file())
    one.write_bytes(bytes([one.read_bytes()[0] ^ 1]) + one.read_bytes()[1:])
    done = subprocess.run([sys.executable, "-I", "-c", script, str(tmp_path / "copy")], capture_output=True, text=True, check=False)
    assert "is altered" in done.stderr


def test_the_study_of_the_studies_page_can_be_frozen(tmp_path):
    (study,) = blocks("studies.md", "toml")
    text = b"The kettle sang before the house was awake. " * 40
    (tmp_path / "text.txt").write_bytes(text)
    (tmp_path / "small.toml").write_text(study.replace("SHA256", digest.sha256(text)))
    spec = freezing.freeze(tmp_path / "small.toml", None, tmp_path / "frozen")
    assert spec.study == "small"

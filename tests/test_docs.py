"""The README documents every command and every make target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ledger import cli

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

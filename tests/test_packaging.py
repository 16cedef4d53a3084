"""The wheel holds everything: migrations, templates, studies; and works where there is no checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if line and not line.startswith("#"))


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_declared_dependency_has_an_exact_version():
    project = PROJECT["project"]
    declared = [*project["dependencies"], *(item for extra in project["optional-dependencies"].values() for item in extra)]
    known = {plain(name) for name in pinned()}
    assert not [item for item in declared if plain(re.split(r"[\[<>=! ]", item)[0]) not in known]


def test_every_constraint_is_one_exact_version():
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pinned().values())
    assert pinned()["torch"] == "2.13.0"


def test_torch_is_not_needed_by_the_archive_alone():
    heavy = ("torch", "transformers", "gguf", "accelerate")
    assert not [item for item in PROJECT["project"]["dependencies"] if item.startswith(heavy)]
    assert PROJECT["project"]["requires-python"] == ">=3.11"


def test_every_package_that_lies_here_is_listed_for_the_wheel():
    places = {"ledger": "ledger", "runners": "runners", "migrations": "ledger.migrations", "templates": "ledger.templates"}
    found = set()
    for folder, package in places.items():
        found.add(package)
        for path in (ROOT / folder).rglob("*.py"):
            below = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *below]))
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built in an environment of its own, from a copy, so that nothing is left in the checkout."""
    import shutil

    source = tmp_path_factory.mktemp("source") / "project"
    source.mkdir()
    for name in ("ledger", "runners", "migrations", "templates"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_migrations_templates_and_studies(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder, package in (("migrations", "ledger/migrations"), ("templates", "ledger/templates"), ("runners/studies", "runners/studies")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert f"{package}/{path.relative_to(ROOT / folder).as_posix()}" in names
    assert not [name for name in names if name.startswith(("tests/", "evidence/")) or name.endswith(".pyc")]


@pytest.mark.slow
def test_the_installed_wheel_makes_archives_and_freezes_shipped_studies(wheel, tmp_path):
    place = tmp_path / "environment"
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    target = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], capture_output=True, text=True, check=True
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The dependencies are those of the environment that runs the tests; the project itself must come from the wheel.
    (Path(target) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LEDGER_", "PYTHONPATH"))}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(place / "bin" / arguments[0]), *arguments[1:]], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert target in run("python", "-c", "import ledger; print(ledger.__file__)")
    assert run("ledger", "--version").startswith("kv-evidence-ledger ")
    run("ledger", "init")
    run("ledger", "freeze", "demo", "-o", "frozen")
    assert (tmp_path / "frozen/spec.json").is_file() and list((tmp_path / "frozen/inputs").iterdir())
    (tmp_path / "evidence/ledger.db").unlink()
    run("ledger", "verify")
    assert "RUN" in run("reproduce-run", "--help")
    code = "from ledger import web; e = web.templates(); print(*[e.get_template(n) and n for n in e.list_templates(['html'])])"
    assert "status.html" in run("python", "-c", code)

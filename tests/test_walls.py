"""The walls between the rooms: import-linter's contracts in ``pyproject.toml``, and here what they cannot say."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = (
    "errors",
    "digest",
    "records",
    "measures",
    "validity",
    "gates",
    "performance",
    "production",
    "tasks",
    "proportions",
    "captures",
    "memory",
    "proportions",
    "tasks",
    "deriving",
    "claims",
    "log",
)
DATABASE = ("tables", "admission", "database", "rows", "archive", "queries", "verify")
"""Modules of ``ledger`` that may know SQLAlchemy; the migrations are apart."""


def modules(package: str) -> dict[str, Path]:
    """Dotted name to path of every module of a package."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, typing_only: bool = True) -> Iterator[str]:
    """Dotted names that a module imports, wherever the statement stands; ``from a import b`` gives ``a`` and ``a.b``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if not typing_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(inner) for item in node.body for inner in ast.walk(item)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


LEDGER = modules("ledger")
RUNNERS = modules("runners")
PURE_MODULES = sorted(name.removeprefix("ledger.") for name in LEDGER if under(name, *(f"ledger.{room}" for room in PURE)))


def test_import_linter_keeps_the_contracts():
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert linter, "import-linter is not installed beside this interpreter"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", sorted(LEDGER))
def test_no_module_of_the_archive_imports_the_tests_or_what_they_need(name):
    assert not [item for item in imports(LEDGER[name]) if under(item, "runners", "torch", "triton", "transformers", "accelerate", "gguf")]


@pytest.mark.parametrize("name", sorted(RUNNERS))
def test_the_tests_import_of_the_archive_only_errors_digest_and_records(name):
    allowed = ("ledger.errors", "ledger.digest", "ledger.records", "ledger.__version__", "ledger.__file__")
    used = {item for item in imports(RUNNERS[name]) if under(item, "ledger") and item != "ledger"}
    assert not {item for item in used if not under(item, *allowed)}


@pytest.mark.parametrize("name", sorted(LEDGER))
def test_only_the_rooms_of_the_database_know_sqlalchemy(name):
    room = name.split(".")[1] if "." in name else name
    if room not in DATABASE:
        assert not [item for item in imports(LEDGER[name]) if under(item, "sqlalchemy", "alembic")]


@pytest.mark.parametrize("name", sorted(LEDGER))
def test_nothing_imports_the_command_line_and_the_pages(name):
    top = ("ledger.cli", "ledger.web", "ledger.terminal")
    if under(name, "ledger.cli"):
        return
    mine = tuple(item for item in top if under(name, item))
    assert not [item for item in imports(LEDGER[name]) if under(item, *top) and not (mine and under(item, *mine))]


@pytest.mark.parametrize("room", PURE_MODULES)
def test_a_pure_module_imports_only_the_pure_ones_and_no_input_or_output(room):
    path = LEDGER[f"ledger.{room}"]
    standard = {
        "__future__", "base64", "binascii", "collections", "dataclasses", "enum", "functools", "hashlib", "itertools",
        "json", "math", "operator", "re", "struct", "typing", "unicodedata", "warnings",
    }  # fmt: skip
    if room == "digest":
        standard = standard | {"pathlib"}  # sha256_file reads a file that it is given, in blocks
    if room in ("gates", "measures"):
        standard = standard | {"contextlib"}
    third = {"numpy", "scipy", "msgspec", "rfc8785", "safetensors"}
    own = {f"ledger.{other}" for other in PURE}
    wrong = []
    for item in imports(path):
        if item == "ledger" or under(item, *own) or item.split(".")[0] in standard | third:
            continue
        wrong.append(item)
    assert not wrong


@pytest.mark.parametrize("room", [room for room in PURE_MODULES if room != "digest"])
def test_a_pure_module_opens_no_file(room):
    tree = ast.parse(LEDGER[f"ledger.{room}"].read_text(encoding="utf-8"))
    names = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    methods = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    assert not names & {"open", "print", "input", "exec", "eval"}
    assert not methods & {"read_bytes", "write_bytes", "read_text", "write_text", "unlink", "mkdir"}


def test_nothing_unpickles_or_trusts_remote_code():
    for name, path in {**LEDGER, **RUNNERS}.items():
        used = set(imports(path))
        assert not used & {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}, name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, name
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, name


def test_the_command_line_starts_without_the_heavy_rooms():
    code = "import sys, ledger.cli; print(*[m for m in ('sqlalchemy', 'numpy', 'fastapi', 'scipy', 'torch', 'git') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []

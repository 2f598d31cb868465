"""The rooms of the app and the direction of their imports, read from the source with `ast`.

Imports go down only. A room that isn't in the table has no place yet: give it one.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APP = "echomq_app"

LEVELS = [
    {"core", "cancel", "conf", "exceptions", "signals", "dedupe"},
    {"models", "engine"},
    {"stream", "log", "following", "events", "feed", "layers"},
    {"live", "jobs", "subscriptions"},
    {"admin", "management", "templatetags", "migrations", "testing", "checks", "routing", "urls"},
    {"apps"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One name that a module imports; `typing` if only a type checker does."""

    importer: str
    name: str
    line: int
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.name}"


@cache
def modules() -> dict[str, Path]:
    """Return all modules of the app by dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / APP).rglob("*.py"))
    }


@cache
def imports() -> tuple[Import, ...]:
    """Return all imports of the app, also those within functions."""
    return tuple(
        found
        for module, path in modules().items()
        for found in imports_of(module, path.read_text(), is_package=path.name == "__init__.py")
    )


def imports_of(module: str, source: str, *, is_package: bool) -> Iterator[Import]:
    tree = ast.parse(source)
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parent = ".".join([*base, *([node.module] if node.module else [])])
            names = [resolve(parent, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(importer=module, name=name, line=node.lineno, typing=node in typing_only)


def resolve(parent: str, name: str) -> str:
    """Return what `from parent import name` loads: a submodule, or `parent` itself."""
    return f"{parent}.{name}" if f"{parent}.{name}" in modules() else parent


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def below(name: str, package: str) -> bool:
    """Tell whether `name` is `package` or in it."""
    return name == package or name.startswith(package + ".")


def reachable(starts: set[str]) -> dict[str, Import]:
    """Return the app's modules that importing `starts` loads, each with the import that does."""
    edges: dict[str, list[Import]] = {}
    for item in imports():
        if item.name in modules() and not item.typing:
            edges.setdefault(item.importer, []).append(item)
    found: dict[str, Import] = {}
    todo = list(starts)
    while todo:
        for item in edges.get(todo.pop(), []):
            if item.name not in found:
                found[item.name] = item
                todo.append(item.name)
    return found


def offenders(wrong: Iterator[Import]) -> list[str]:
    return [str(item) for item in wrong]


def test_every_room_has_a_place() -> None:
    assert {room(module) for module in modules()} - {""} <= set(LEVEL)


def test_imports_go_down() -> None:
    assert not offenders(
        item
        for item in imports()
        if below(item.name, APP)
        and room(item.importer)
        and LEVEL.get(room(item.name), -1) > LEVEL.get(room(item.importer), -1)
    )


def test_no_module_imports_itself_over_others() -> None:
    cycles = {module for module in modules() if module in reachable({module})}
    # A package that gathers names for __all__ is no room of its own: its parts may
    # reach one another by it.
    assert {module for module in cycles if modules()[module].name != "__init__.py"} == set()


def test_app_never_imports_its_host_or_tests() -> None:
    assert not offenders(
        item for item in imports() if below(item.name, "project") or below(item.name, "tests")
    )


def test_layers_never_touch_models() -> None:
    start = {module for module in modules() if room(module) == "layers"}
    loaded = reachable(start)
    assert [str(loaded[name]) for name in loaded if room(name) == "models"] == []


def test_only_conf_reads_django_conf() -> None:
    assert not offenders(
        item
        for item in imports()
        if below(item.name, "django.conf") and item.importer != f"{APP}.conf"
    )


@pytest.mark.parametrize("pure", ["core", "cancel"])
def test_pure_rooms_import_standard_library_and_msgspec_only(pure: str) -> None:
    start = {module for module in modules() if room(module) == pure}
    assert start
    allowed = {*sys.stdlib_module_names, "msgspec", APP}
    assert not offenders(
        item
        for item in imports()
        if item.importer in start | set(reachable(start)) and item.name.split(".")[0] not in allowed
    )


def test_pure_rooms_load_without_django() -> None:
    pure = [module for module in modules() if room(module) in {"core", "cancel"}]
    script = (
        "import sys, importlib\n"
        "for name in ('django', 'channels', 'asgiref', 'redis'): sys.modules[name] = None\n"
        f"for name in {pure!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_reader_of_imports_sees_them_all() -> None:
    source = (
        "import a.b\n"
        "from . import sibling\n"
        "from ..conf import current\n"
        "def late():\n"
        "    from echomq_app.models import sql\n"
        "if TYPE_CHECKING:\n"
        "    from ..exceptions import EchoMQError\n"
    )
    found = list(imports_of("echomq_app.models.sql", source, is_package=False))
    assert sorted((item.name, item.line, item.typing) for item in found) == [
        ("a.b", 1, False),
        ("echomq_app.conf", 3, False),
        ("echomq_app.exceptions", 7, True),
        ("echomq_app.models", 2, False),
        ("echomq_app.models.sql", 5, False),
    ]
    package = list(imports_of("echomq_app.models", "from .sql import X", is_package=True))
    assert [item.name for item in package] == ["echomq_app.models.sql"]

"""The docs keep up with the code: every setting, error, command and check is documented."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from echomq_app import exceptions
from echomq_app.conf import EchoMQSettings

ROOT = Path(__file__).resolve().parents[2]
DOCS = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(EchoMQSettings)])
def test_every_setting_is_documented(field: str) -> None:
    assert f"`{field}`" in DOCS["settings.md"]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in vars(exceptions).items()
        if inspect.isclass(value) and issubclass(value, exceptions.EchoMQError)
    ],
)
def test_every_error_is_in_the_tree_and_in_the_docs(name: str) -> None:
    assert name in str(exceptions.__doc__)
    assert any(name in text for text in DOCS.values())


@pytest.mark.parametrize(
    "command",
    [path.stem for path in (ROOT / "echomq_app/management/commands").glob("echomq_*.py")],
)
def test_every_command_is_documented(command: str) -> None:
    assert command in DOCS["commands.md"]


def test_every_check_is_documented() -> None:
    ids = set(re.findall(r"echomq\.[EW]\d{3}", (ROOT / "echomq_app/checks.py").read_text()))
    assert ids
    assert ids <= set(re.findall(r"echomq\.[EW]\d{3}", DOCS["settings.md"]))


@pytest.mark.parametrize("name", ["README.md", *sorted(DOCS)])
def test_links_lead_somewhere(name: str) -> None:
    text, folder = (README, ROOT) if name == "README.md" else (DOCS[name], ROOT / "docs")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (folder / target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", ["README.md", *sorted(DOCS)])
def test_python_examples_parse(name: str) -> None:
    text = README if name == "README.md" else DOCS[name]
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.S):
        compile(code.replace("...,", "*[],"), name, "exec", flags=0x2000)  # top-level await

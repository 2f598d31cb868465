"""The JavaScript client as it is shipped. Its rules are in *.test.mjs, see test_page_rules.py."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from echomq_app.core import frames

HERE = Path(__file__).parent
STATIC = HERE.parents[1] / "echomq_app/static/echomq"
CLIENT = STATIC / "echomq.js"
ELEMENT = STATIC / "echomq-stream.js"


def test_client_is_small() -> None:
    assert len(gzip.compress(CLIENT.read_bytes())) <= 6 * 1024
    assert len(gzip.compress(ELEMENT.read_bytes())) <= 2 * 1024


@pytest.mark.parametrize("module", [CLIENT, ELEMENT], ids=lambda path: path.stem)
def test_types_declare_what_is_exported(module: Path) -> None:
    exported = r"^export (?:function|const|class) (\w+)"
    names = re.findall(exported, module.read_text(), flags=re.M)
    assert names
    declared = module.with_suffix(".d.ts").read_text()
    assert sorted(names) == sorted(re.findall(exported, declared, flags=re.M))


@pytest.mark.parametrize("module", [CLIENT, ELEMENT], ids=lambda path: path.stem)
def test_nothing_that_a_strict_policy_forbids(module: Path) -> None:
    text = module.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "Function(", ".style"):
        assert word not in text


def test_client_and_server_agree_on_the_protocol() -> None:
    text = CLIENT.read_text()
    assert f'"{frames.SUBPROTOCOL}"' in text
    from_server = {frame.__struct_config__.tag for frame in frames.ServerFrame.__args__}
    handled = set(re.findall(r"on_(\w+)\(", text)) | set(re.findall(r'type === "(\w+)"', text))
    assert from_server - handled == {"unsubscribed", "pong"}  # they say nothing new
    assert {4400, 4401, 4413} == frames.Close.FATAL


def test_types_compile() -> None:
    tsc = shutil.which("tsc")
    if tsc is None:
        pytest.skip("there is no tsc on PATH (npm install --global typescript)")
    options = "--noEmit --strict --target es2022 --module es2022 --moduleResolution bundler"
    command = [tsc, *options.split(), "--lib", "es2022,dom,dom.iterable", "--types", ""]
    result = subprocess.run(
        [*command, str(HERE / "echomq_types.ts")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

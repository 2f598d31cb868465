"""The page's rules (resume, dedupe, ranges), by node's own test runner."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def test_rules_of_the_page_under_node() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node on PATH")
    files = sorted(Path(__file__).parent.glob("*.test.mjs"))
    assert files
    result = subprocess.run(
        [node, "--test", *map(str, files)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr

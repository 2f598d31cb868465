"""The host project as it comes out of a clone, before anything was made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_manage_py_works_before_there_is_a_folder_for_the_data(tmp_path: Path) -> None:
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "DJANGO_SETTINGS_MODULE" and not name.startswith("ECHOMQ_")
    }
    env["ECHOMQ_DEMO_DIR"] = str(tmp_path / "not" / "there")
    for arguments in (["check"], ["migrate", "--verbosity=0"], ["check", "--database=default"]):
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            check=False,
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

"""The wheel, in a project that knows nothing of this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FIRST_APPEND = """
import django
django.setup()
import echomq_app
print(echomq_app.__file__)
from echomq_app.stream import Stream
receipt = Stream("orders").append({"n": 1})
page = Stream("orders").read()
print(receipt.position, [record.data for record in page.records], page.write_cursor)
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    """Run a command without this checkout's settings, and return what it prints."""
    kept = {name: value for name, value in os.environ.items() if "ECHOMQ" not in name}
    kept |= {"DJANGO_SETTINGS_MODULE": "", "PYTHONPATH": "", **env}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={name: value for name, value in kept.items() if value},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the source distribution, so that both are whole."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    [sdist] = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--no-build-isolation", "-w", folder, sdist, cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def test_wheel_carries_the_app_whole_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "echomq_app").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == source
    assert {"echomq_app/py.typed", "echomq_app/migrations/0001_initial.py"} <= names


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(path).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["Name"] == "django-echomq"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(line.split(">")[0].split("<")[0].lower() for line in needed) == [
        "channels",
        "cronsim",
        "django",
        "django-tasks",
        "msgspec",
    ]


def test_fresh_project_with_the_wheel(wheel: Path, tmp_path: Path) -> None:
    # A new environment with the wheel alone. Its requirements aren't downloaded
    # again: a .pth file points to those that run this test, behind its own packages.
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = Path(
        run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    site.joinpath("requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")

    run(python, "-m", "django", "startproject", "shop", tmp_path, cwd=tmp_path)
    settings = tmp_path / "shop" / "settings.py"
    text = settings.read_text()
    assert "INSTALLED_APPS = [" in text
    settings.write_text(text.replace("INSTALLED_APPS = [", 'INSTALLED_APPS = [\n    "echomq_app",'))

    run(python, "manage.py", "check", cwd=tmp_path)
    run(python, "manage.py", "migrate", "--verbosity=0", cwd=tmp_path)
    run(python, "manage.py", "makemigrations", "--check", "--dry-run", cwd=tmp_path)
    shown = run(
        python, "-c", FIRST_APPEND, cwd=tmp_path, DJANGO_SETTINGS_MODULE="shop.settings"
    ).splitlines()
    assert Path(shown[0]).parent.parent == site
    assert shown[1] == "0 [{'n': 1}] 1"

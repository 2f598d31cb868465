"""The one import of Django's Tasks API, on Django 5.2 with each naming of `django-tasks`.

Releases up to 0.12 call two exceptions differently from Django; its main branch uses Django's
names.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import django
import pytest

from echomq_app.jobs import tasks_api

PARTS = ("", ".backends", ".base", ".exceptions", ".signals", ".utils")
BACKENDS = (".backends.base", ".backends.dummy", ".backends.immediate")
RELEASED = ("InvalidTaskError", "InvalidTaskBackendError")
NEXT = ("InvalidTask", "InvalidTaskBackend")


def package_with(names: tuple[str, str]) -> dict[str, ModuleType]:
    """Return the modules of a `django_tasks` whose exceptions have these names.

    What is in them is what this Django, or the installed package, has.
    """
    modules = {}
    for part in (*PARTS, *BACKENDS):
        modules[f"django_tasks{part}"] = module = ModuleType(f"django_tasks{part}")
        for name in tasks_api.__all__:
            if not name.startswith("Invalid"):
                setattr(module, name, getattr(tasks_api, name))
    exceptions: Any = modules["django_tasks.exceptions"]
    for name, known in zip(
        names, (tasks_api.InvalidTask, tasks_api.InvalidTaskBackend), strict=True
    ):
        setattr(exceptions, name, known)
    return modules


@pytest.mark.parametrize("names", [RELEASED, NEXT], ids=["0.12", "main"])
def test_each_naming_of_the_backport_is_taken(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    monkeypatch.setattr(django, "VERSION", (5, 2, 0, "final", 0))
    for name, module in package_with(names).items():
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location(
        "echomq_app.jobs.tasks_api_again", tasks_api.__file__
    )
    assert spec is not None and spec.loader is not None
    shim: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    for name in tasks_api.__all__:
        assert getattr(shim, name) is getattr(tasks_api, name), name

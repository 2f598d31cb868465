"""`manage.py echomq_worker`: run jobs until told to stop."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from argparse import ArgumentTypeError
from typing import Any

from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    SystemCheckError,
)
from django.db import DatabaseError

from ...exceptions import InvalidArgument, InvalidName, WorkerError
from ...jobs.backend import EchoMQBackend
from ...jobs.tasks_api import task_backends
from ...jobs.worker import Worker
from ...jobs.worker_options import WorkerOptions

FAILURE = 1
USAGE = 2
NO_START = 3


class Command(BaseCommand):
    help = (
        "Run jobs of one or more queues. The first SIGTERM or Ctrl-C stops in good order: no "
        "new jobs, running ones are asked to stop and have --grace seconds; what is left is "
        "handed back. The second one stops at once. Exit codes: 0 stopped in good order, "
        "1 something could not be written, 2 usage, 3 could not start."
    )

    # In `handle` instead: they touch the database, and a failure to start has its own code.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        default = {field.name: field.default for field in dataclasses.fields(WorkerOptions)}
        parser.add_argument(
            "--queue",
            action="append",
            metavar="NAME",
            help="a queue, or several with commas; may be repeated. Default: all QUEUES of the "
            "EchoMQ backends in TASKS",
        )
        parser.add_argument(
            "--drain", action="store_true", help="end when there is nothing to do any more"
        )
        parser.add_argument(
            "--name", default="", help="what jobs and records call this worker; default: host:pid"
        )
        for option, kind, metavar, text in (
            ("concurrency", int, "N", "how many jobs run at once"),
            ("grace", _seconds, "S", "how long running jobs get to stop"),
            ("poll", _seconds, "S", "look for work at least this often"),
            ("lease", _seconds, "S", "a silent worker loses its jobs after this"),
            ("heartbeat", _seconds, "S", "how often the lease is renewed"),
        ):
            parser.add_argument(
                f"--{option}",
                type=kind,
                metavar=metavar,
                default=default[option],
                help=f"{text} (default: %(default)s)",
            )

    def handle(self, *args: Any, **options: Any) -> None:
        names = ("concurrency", "grace", "drain", "poll", "lease", "heartbeat", "name")
        try:
            worker = Worker(
                WorkerOptions(
                    queues=_queues(options["queue"]), **{name: options[name] for name in names}
                ),
                on_started=self._say_ready,
            )
        except (InvalidArgument, InvalidName) as error:
            raise CommandError(str(error), returncode=USAGE) from error
        self._check()
        try:
            written = worker.run()
        except WorkerError as error:
            raise CommandError(str(error), returncode=NO_START) from error
        if worker.left_behind:
            # Their handlers still run in daemon threads, which could not be ended.
            _leave(0 if written else FAILURE)
        if not written:
            raise CommandError("Not everything could be written.", returncode=FAILURE)

    def _check(self) -> None:
        try:
            self.check()
        except SystemCheckError as error:
            error.returncode = NO_START
            raise
        except DatabaseError as error:
            raise CommandError(
                f"The worker can't use the database: {error}", returncode=NO_START
            ) from error

    def _say_ready(self, name: str) -> None:
        self.stdout.write(f"Worker {name} is ready.")
        self.stdout.flush()


def _queues(given: list[str] | None) -> tuple[str, ...]:
    if given:
        names = [name for text in given for name in text.split(",") if name]
        return tuple(dict.fromkeys(names))
    ours = [b for b in task_backends.all() if isinstance(b, EchoMQBackend)]
    if not ours:
        raise InvalidArgument("TASKS has no EchoMQ backend. Set one, or name queues by --queue.")
    return tuple(sorted({queue for backend in ours for queue in backend.queues}))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number of seconds; write 30 or 0.5.") from None


def _leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

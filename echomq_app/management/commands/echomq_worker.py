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
from django.db import DatabaseError, connections

from ...exceptions import InvalidArgument, InvalidName, InvalidPayload, WorkerError
from ...jobs.backend import EchoMQBackend
from ...jobs.supervisor import PARENT, Supervisor, child_command
from ...jobs.tasks_api import task_backends
from ...jobs.worker import Worker
from ...jobs.worker_options import WorkerOptions

FAILURE = 1
USAGE = 2
NO_START = 3


class Command(BaseCommand):
    help = (
        "Run jobs of one or more queues. SIGTERM or Ctrl-C stops gracefully: no new jobs, "
        "running ones are asked to stop and have --grace seconds; what is left is released. "
        "Another SIGTERM changes nothing; Ctrl-C again, a second later, or SIGQUIT ends at "
        "once. Exit codes: 0 stopped gracefully, "
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
            help="a queue, or several with commas; may be repeated. mail:8 and bulk:2 share the "
            "worker in that proportion while both have jobs. Default: all QUEUES of the EchoMQ "
            "backends in TASKS",
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

        for option, metavar, text in (
            ("process-concurrency", "N", "processes for handlers with process=True; default: CPUs"),
            ("processes", "N", "run N such workers as processes, and replace those that end"),
            ("max-jobs", "N", "end in good order after N jobs"),
            ("max-rss", "MIB", "end in good order when the process holds more memory"),
        ):
            parser.add_argument(f"--{option}", type=int, metavar=metavar, help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        names = (
            *("concurrency", "grace", "drain", "poll", "lease", "heartbeat", "name"),
            *("process_concurrency", "max_jobs", "max_rss"),
        )
        # Taken: what a handler starts is no worker of that parent's.
        parent = os.environ.pop(PARENT, None)
        try:
            queues, weights = _queues(options["queue"])
            worker_options = WorkerOptions(
                queues=queues,
                weights=weights,
                parent=int(parent) if parent else None,
                **{name: options[name] for name in names},
            )
            worker = Worker(worker_options, on_started=self._say_ready)
        except (InvalidArgument, InvalidName, InvalidPayload) as error:
            raise CommandError(str(error), returncode=USAGE) from error
        self._check()
        # A child never supervises in turn, however the option was written (--processe 2).
        if options["processes"] is not None and parent is None:
            self._supervise(options["processes"], worker_options)
            return
        try:
            written = worker.run()
        except WorkerError as error:
            raise CommandError(str(error), returncode=NO_START) from error
        if worker.spent:
            self.stdout.write(f"Worker {worker.name} ends after {worker.spent}.")
        if worker.left_behind:
            # Their handlers still run in daemon threads, which could not be ended.
            _leave(0 if written else FAILURE)
        if not written:
            raise CommandError("Not everything could be written.", returncode=FAILURE)

    def _supervise(self, processes: int, options: WorkerOptions) -> None:
        if not 1 <= processes <= 256 or options.name:
            raise CommandError(
                "--processes is 1 to 256, and such workers have no --name: each is host:pid.",
                returncode=USAGE,
            )
        connections.close_all()
        supervisor = Supervisor(child_command(sys.orig_argv), processes, again=not options.drain)
        code = supervisor.run()
        if code:
            raise CommandError("A worker did not end in good order.", returncode=code)

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


def _queues(given: list[str] | None) -> tuple[tuple[str, ...], dict[str, int]]:
    """Return the queues, and the weights of those that have one."""
    if given:
        weights: dict[str, int] = {}
        names = []
        for text in (part for texts in given for part in texts.split(",") if part):
            name, colon, weight = text.partition(":")
            names.append(name)
            if colon:
                if not weight.isdecimal():
                    raise InvalidArgument(f"{text!r} is no queue and weight; write mail:8.")
                weights[name] = int(weight)
        return tuple(dict.fromkeys(names)), weights
    ours = [b for b in task_backends.all() if isinstance(b, EchoMQBackend)]
    if not ours:
        raise InvalidArgument("TASKS has no EchoMQ backend. Set one, or name queues by --queue.")
    return tuple(sorted({queue for backend in ours for queue in backend.queues})), {}


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

"""`manage.py echomq_health`: one line of JSON and an exit code, for probes."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from ...core.names import check_queue_name
from ...exceptions import InvalidName
from ...jobs.health import Limits, report
from .. import arguments
from ..failing import FAILURE, USAGE
from ..output import json_line


class Command(BaseCommand):
    help = (
        "Look at the database, the migrations, the workers and the queues; print one line of JSON. "
        "Exit codes: 0 all is well, 1 it isn't ('problems' says what), 2 usage."
    )

    # They may need the database, whose absence is what we are asked about.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--queue",
            action="append",
            default=[],
            metavar="NAME",
            help="look at this queue; may be repeated. Default: those of TASKS and of workers",
        )
        parser.add_argument(
            "--max-age",
            type=arguments.duration,
            metavar="AGE",
            help="a job that has been ready for longer is a problem: 30s, 5m",
        )
        parser.add_argument(
            "--max-backlog",
            type=arguments.count,
            metavar="N",
            help="more records in the outbox are a problem",
        )
        parser.add_argument(
            "--min-workers",
            type=arguments.count,
            default=0,
            metavar="N",
            help="fewer living workers of a queue are a problem (default: 0)",
        )
        parser.add_argument(
            "--worker", metavar="NAME", help="this worker has to live: for its own liveness probe"
        )

    def handle(self, **options: Any) -> None:
        try:
            for queue in options["queue"]:
                check_queue_name(queue)
        except InvalidName as error:
            raise CommandError(str(error), returncode=USAGE) from error
        age = options["max_age"]
        found = report(
            options["queue"],
            Limits(
                max_age=None if age is None else age.total_seconds(),
                max_backlog=options["max_backlog"],
                min_workers=options["min_workers"],
                worker=options["worker"],
            ),
        )
        self.stdout.write(json_line(found))
        if not found["ok"]:
            self.stdout.flush()
            raise CommandError("; ".join(found["problems"]), returncode=FAILURE)

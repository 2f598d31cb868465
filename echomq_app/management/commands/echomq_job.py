"""`manage.py echomq_job`: list, show, cancel, retry and prune jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import router
from django.db.models import Q
from django.utils import timezone

from ... import engine
from ...jobs import control, retention
from ...models import Job, JobState
from .. import arguments, job_verbs
from ..failing import USAGE, ending_cleanly
from ..output import FORMATS, Output


class Command(BaseCommand):
    help = "List, show, cancel, retry and prune jobs."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
        shown, picked = CommandParser(add_help=False), CommandParser(add_help=False)
        shown.add_argument("--format", choices=FORMATS, default="table")
        picked.add_argument("--queue", help="jobs of this queue")
        picked.add_argument("--task", help="jobs of this task, by its whole path")
        picked.add_argument("--group", help="jobs of this group")
        picked.add_argument("--state", choices=JobState.values)
        verb = verbs.add_parser("list", help="list jobs, newest first", parents=[shown, picked])
        verb.add_argument("--limit", type=arguments.some, default=50, metavar="N")
        verbs.add_parser("show", help="show all of a job", parents=[shown]).add_argument("id")
        verb = verbs.add_parser(
            "cancel", help="cancel jobs by id, or all that are picked", parents=[shown, picked]
        )
        verb.add_argument("id", nargs="*")
        verb.add_argument("--reason", help="why; the handler is given it")
        verb = verbs.add_parser("retry", help="run failed or cancelled jobs again", parents=[shown])
        verb.add_argument("id", nargs="+")
        verb = verbs.add_parser("prune", help="delete jobs that ended long ago", parents=[shown])
        verb.add_argument("--older-than", type=arguments.duration, required=True, metavar="AGE")

    def handle(self, **options: Any) -> None:
        output = Output(self.stdout, options["format"])
        with ending_cleanly():
            getattr(self, f"_{options['verb']}")(options, output, router.db_for_write(Job))
            self.stdout.flush()
            engine.flush()  # workers elsewhere wait for the wake-up

    def _list(self, options: dict[str, Any], output: Output, using: str) -> None:
        found = job_verbs.rows(using, job_verbs.condition(options), options["limit"])
        output.many(found, job_verbs.COLUMNS)

    def _show(self, options: dict[str, Any], output: Output, using: str) -> None:
        output.one(job_verbs.whole(using, options["id"]))

    def _cancel(self, options: dict[str, Any], output: Output, using: str) -> None:
        picked = job_verbs.condition(options)
        if bool(options["id"]) == (picked != Q()):
            text = "Name jobs by id, or pick them by --queue, --task, --group or --state."
            raise CommandError(text, returncode=USAGE)
        if options["id"]:
            answers = [
                {"id": id, "answer": control.cancel(id, options["reason"])} for id in options["id"]
            ]
            output.many(answers, ("id", "answer"))
            return
        done = control.cancel_many(picked, options["reason"])
        output.one(dataclasses.asdict(done))
        _complain(done.failed, "cancelled")

    def _retry(self, options: dict[str, Any], output: Output, using: str) -> None:
        answers = [{"id": id, "answer": control.retry(id)} for id in options["id"]]
        output.many(answers, ("id", "answer"))

    def _prune(self, options: dict[str, Any], output: Output, using: str) -> None:
        before = timezone.now() - options["older_than"]
        deleted, failed = retention.prune_finished(using, before)
        output.one({"deleted": deleted})
        _complain(failed, "deleted")


def _complain(failed: int, what: str) -> None:
    if failed:
        raise CommandError(
            f"{failed} jobs could not be {what}: the log says why. Run it again when that is "
            "solved."
        )

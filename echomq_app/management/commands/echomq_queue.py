"""`manage.py echomq_queue`: list, pause and resume queues."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import router

from ... import engine
from ...jobs import control
from ...models import Queue
from ..failing import ending_cleanly
from ..output import FORMATS, Output

_COLUMNS = ("queue", "paused_at", "reason")


class Command(BaseCommand):
    help = "List, pause and resume queues. Running jobs of a paused queue go on."

    def add_arguments(self, parser: CommandParser) -> None:
        shown = CommandParser(add_help=False)
        shown.add_argument("--format", choices=FORMATS, default="table")
        verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
        verbs.add_parser("list", help="list queues that workers have served", parents=[shown])
        verb = verbs.add_parser("pause", help="let no worker claim from a queue", parents=[shown])
        verb.add_argument("name")
        verb.add_argument("--reason", help="why; it is shown with the queue")
        verb = verbs.add_parser("resume", help="let workers claim again", parents=[shown])
        verb.add_argument("name")

    def handle(self, **options: Any) -> None:
        output = Output(self.stdout, options["format"])
        with ending_cleanly():
            if options["verb"] == "list":
                rows = Queue.objects.using(router.db_for_write(Queue)).order_by("name")
                output.many(
                    [
                        {"queue": row.name, "paused_at": row.paused_at, "reason": row.pause_reason}
                        for row in rows
                    ],
                    _COLUMNS,
                )
                return
            name = options["name"]
            if options["verb"] == "pause":
                changed = control.pause(name, options["reason"])
            else:
                changed = control.resume(name)
            output.one({"queue": name, "changed": changed})
            engine.flush()  # workers elsewhere wait for the wake-up

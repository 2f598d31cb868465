"""`manage.py echomq_stream`: look into streams, follow, write, trim and delete them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections, router

from ... import engine
from ...models import Record
from ...stream import Stream
from .. import arguments, stream_verbs
from ..failing import USAGE, ending_cleanly
from ..output import FORMATS, Output
from ..reading import Selection


class Command(BaseCommand):
    """Parses, builds a `Selection` and an `Output`, runs a verb."""

    help = "Look into streams, follow, write, trim and delete them."

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True)
        common, shown = _common(), _shown()
        verb = verbs.add_parser("list", help="list streams", parents=[common, shown])
        verb.add_argument("prefix", nargs="?", default="", help="only names that begin so")
        verb = verbs.add_parser("info", help="show what a stream holds", parents=[common, shown])
        verb.add_argument("name")
        _add_append(verbs.add_parser("append", help="append a record", parents=[common, shown]))
        verbs.add_parser("read", help="print records", parents=[common, shown, _picked(100)])
        verb = verbs.add_parser(
            "tail",
            help="print records as they come, as lines of JSON",
            parents=[common, _picked(None)],
        )
        verb.add_argument("--exit-at-end", action="store_true", help="end when caught up")
        verbs.add_parser(
            "export", help="print all records, as lines of JSON", parents=[common, _picked(None)]
        )
        _add_trim(verbs.add_parser("trim", help="remove old records", parents=[common, shown]))
        verb = verbs.add_parser(
            "relay", help="move what waits in the outbox into its stream", parents=[common, shown]
        )
        verb.add_argument("name", nargs="?", help="one stream (default: all that wait)")
        verb = verbs.add_parser("delete", help="delete a stream and its records", parents=[common])
        verb.add_argument("name")
        verb.add_argument("--dry-run", action="store_true", help="say what would go")
        verb.add_argument("--no-input", action="store_true", help="don't ask")

    def handle(self, **options: Any) -> None:
        with ending_cleanly():
            getattr(self, f"_{options['verb']}")(options)
            self.stdout.flush()
            engine.flush()  # readers elsewhere wait for the wake-up

    def _list(self, options: dict[str, Any]) -> None:
        rows = stream_verbs.overviews(options["database"], options["prefix"])
        self._output(options).many(rows, stream_verbs.STREAM_COLUMNS)

    def _info(self, options: dict[str, Any]) -> None:
        self._output(options).one(self._stream(options).info())

    def _append(self, options: dict[str, Any]) -> None:
        data = options["data"]
        if data == "-":
            data = sys.stdin.read()
        names = ("type", "key", "headers", "idempotency_key", "expected_cursor")
        try:
            value = arguments.json_value(data)
        except argparse.ArgumentTypeError as error:
            raise CommandError(f"data: {error}", returncode=USAGE) from None
        receipt = self._stream(options).append(value, **{name: options[name] for name in names})
        self._output(options).one(receipt)

    def _read(self, options: dict[str, Any]) -> None:
        output = self._output(options)
        pages = list(_selection(options).pages(self._stream(options)))
        if output.format == "json":
            output.one(stream_verbs.one_page(pages))
        else:
            records = [record for page in pages for record in page.records]
            output.many(records, stream_verbs.RECORD_COLUMNS)

    def _tail(self, options: dict[str, Any]) -> None:
        selection, output = _selection(options), Output(self.stdout, "jsonl")
        read = selection.records if options["exit_at_end"] else selection.follow
        for record in read(self._stream(options)):
            output.line(record, flush=True)

    def _export(self, options: dict[str, Any]) -> None:
        records = _selection(options).records(self._stream(options))
        progress = stream_verbs.Progress(self.stderr)
        Output(self.stdout, "jsonl").many(progress.count(records), ())

    def _trim(self, options: dict[str, Any]) -> None:
        limits = {name: options[name] for name in ("max_records", "max_age", "before")}
        if options["name"] is None and any(limit is not None for limit in limits.values()):
            raise CommandError(
                "Name a stream to trim it by these limits; without a name, every stream is "
                "trimmed by its own retention policy.",
                returncode=USAGE,
            )
        if options["name"] is None:
            results = stream_verbs.apply_retention(options["database"], options["dry_run"])
        else:
            results = [self._stream(options).trim(**limits, dry_run=options["dry_run"])]
        self._output(options).many(results, stream_verbs.TRIM_COLUMNS)
        failed = [result for result in results if result.error]
        if failed:
            names = ", ".join(result.stream for result in failed)
            raise CommandError(f"Could not trim {names}: {failed[0].error}. Run it again.")

    def _relay(self, options: dict[str, Any]) -> None:
        results, failed = stream_verbs.relay(options["database"], options["name"])
        self._output(options).many(results, stream_verbs.RELAY_COLUMNS)
        if failed:
            raise CommandError(f"Could not relay {', '.join(failed)}: {min(failed.values())}.")
        if any(result["waiting"] for result in results):
            raise CommandError("Somebody holds a stream's lock; call it again.")

    def _delete(self, options: dict[str, Any]) -> None:
        stream = self._stream(options)
        count = stream.info().count
        what = f"stream {stream.name} and its {count:,} record(s)"
        if options["dry_run"]:
            self.stdout.write(f"Would delete {what}.")
            return
        if not options["no_input"] and not self._confirmed(stream.name, what):
            raise CommandError("Nothing was deleted.")
        stream.delete()
        self.stdout.write(f"Deleted {what}.")

    def _confirmed(self, name: str, what: str) -> bool:
        if not sys.stdin.isatty():
            raise CommandError(
                "delete asks before it deletes, and this is no terminal: add --no-input.",
                returncode=USAGE,
            )
        return input(f"This deletes {what} for good. Type the name to go on: ") == name

    def _stream(self, options: dict[str, Any]) -> Stream:
        return Stream(options["name"], using=options["database"])

    def _output(self, options: dict[str, Any]) -> Output:
        return Output(self.stdout, options["format"])


def _common() -> CommandParser:
    parser = CommandParser(add_help=False)
    parser.add_argument(
        "--database",
        choices=sorted(connections),
        default=router.db_for_write(Record),
        metavar="ALIAS",
        help="which database (default: %(default)s)",
    )
    return parser


def _shown() -> CommandParser:
    parser = CommandParser(add_help=False)
    parser.add_argument(
        "--format", choices=FORMATS, default="table", help="how to print (default: %(default)s)"
    )
    return parser


def _picked(limit: int | None) -> CommandParser:
    parser = CommandParser(add_help=False)
    parser.add_argument("name")
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--from",
        dest="begin",
        type=arguments.cursor,
        metavar="PLACE",
        help="a cursor, a resume token, beginning or end (tail: end, the others: beginning)",
    )
    begin.add_argument("--since", type=arguments.moment, metavar="TIME", help="a time, or 1h")
    begin.add_argument("--last", type=arguments.some, metavar="N", help="the newest N before now")
    parser.add_argument(
        "-n",
        "--limit",
        type=arguments.some,
        default=limit,
        metavar="N",
        help=f"at most N records (default: {limit or 'all'})",
    )
    parser.add_argument(
        "--types",
        type=arguments.words,
        action="extend",
        metavar="TYPE,...",
        help="only records of these types",
    )
    parser.add_argument("--key", help="only records of this key")
    return parser


def _add_append(verb: CommandParser) -> None:
    verb.add_argument("name")
    verb.add_argument("data", help="a JSON value; - reads it from the standard input")
    verb.add_argument("--type", default="")
    verb.add_argument("--key", default="")
    verb.add_argument("--headers", type=arguments.json_value, metavar="JSON")
    verb.add_argument("--idempotency-key", default="", metavar="KEY")
    verb.add_argument("--expected-cursor", type=arguments.count, metavar="CURSOR")


def _add_trim(verb: CommandParser) -> None:
    verb.add_argument("name", nargs="?", help="one stream (default: all, by their policies)")
    verb.add_argument("--max-records", type=arguments.count, metavar="N", help="keep the newest N")
    verb.add_argument("--max-age", type=arguments.duration, metavar="DURATION", help="such as 7d")
    verb.add_argument(
        "--before", type=arguments.place, metavar="PLACE", help="keep from this position or time on"
    )
    verb.add_argument("--dry-run", action="store_true", help="say what would go")


def _selection(options: dict[str, Any]) -> Selection:
    follows = options["verb"] == "tail" and not options["exit_at_end"]
    names = ("since", "last", "types", "key", "limit")
    return Selection(
        begin="end" if options["begin"] is None and follows else options["begin"] or "beginning",
        **{name: options[name] for name in names},
    )

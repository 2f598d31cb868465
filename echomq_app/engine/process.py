"""The one engine of this process, and what a fork, an exit and a change of settings do."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from channels.layers import get_channel_layer
from django.core.signals import setting_changed

from ..conf import current
from ..exceptions import EngineStopped
from . import in_memory, reach
from .broker import Broker, Merge
from .loop_thread import LoopThread
from .resubscribe import WAKE, GroupListener
from .switchboard import Sink, Switchboard
from .wake import Notifier, WakeWaiter

logger = logging.getLogger("echomq")

T = TypeVar("T")

STOP_TIMEOUT = 4.0
"""How long the thread may take to end before the daemon is left to its fate."""
EXIT_GRACE = 0.25
"""How long an exit waits for messages when no connection is known to be good."""


class Engine:
    """Sends and receives for the whole process, on a loop of its own."""

    def __init__(self) -> None:
        self._switchboard = Switchboard()
        self._thread = LoopThread("echomq-engine", on_start=self._on_start, on_stop=self._on_stop)
        self._broker = Broker(self._thread.call)
        self._notifier = Notifier(self._wake_now, self._call_later)
        self._listener: GroupListener | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # What others call, from any thread.

    def submit(self, factory: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Run the coroutine that `factory()` makes on the engine's loop.

        Cancelling the future cancels it. It fails with `EngineStopped` when the process
        is ending.
        """
        loop = self._thread.loop()
        if loop is not None:
            coroutine = factory()
            try:
                return asyncio.run_coroutine_threadsafe(coroutine, loop)
            except RuntimeError:  # closed in this very moment
                coroutine.close()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.set_exception(EngineStopped("The process is ending; nothing new is started."))
        return future

    def send(
        self,
        group: str,
        message: dict[str, Any],
        *,
        coalesce_key: str | None = None,
        merge: Merge | None = None,
    ) -> int | None:
        """Send `message` to the layer's group in the background, and don't wait for it.

        Returns how many receive it where that is known (no broker: sinks and consumers of
        this process), else None. A lost message is logged and signalled
        (`signals.publish_failed`), never raised. Messages to one group stay in order.
        While a message with the same `coalesce_key` waits for its group, this one is
        dropped. `message["type"]` names the consumers' handler; the keys `group`,
        `sender` and `number` are added.
        """
        layer = self._layer()
        if reach.crosses_processes(layer):
            self._broker.send(group, message, key=coalesce_key, merge=merge)
            return None
        return self._send_here(layer, group, message)

    def notify(self, group: str) -> None:
        """Wake the waiters of `group` in all processes. Never blocks, never raises.

        At once for the first, then at most once per NOTIFY_INTERVAL and group.
        """
        try:
            if self._switchboard.wants(group) or self.has_broker():
                self._notifier.notify(group)
        except Exception:
            logger.exception("event=notify_failed group=%s", group)

    def waiter(self, *groups: str) -> WakeWaiter:
        """Return a `WakeWaiter` for these groups; it hears from `with` to the block's end.

        Entering doesn't wait for the broker: a wake-up from another process may be
        missed until the groups are joined, and then the waiter is woken once.
        """
        return WakeWaiter(groups, self.plug_in, self.unplug)

    def plug_in(self, sink: WakeWaiter) -> None:
        """Deliver what comes for `sink.groups` to it."""
        self.add_sink(sink, sink.groups)

    def unplug(self, sink: WakeWaiter) -> None:
        """Deliver no more."""
        self.remove_sink(sink, sink.groups)

    def add_sink(self, sink: Sink, groups: tuple[str, ...]) -> None:
        """Deliver what comes for these groups to `sink`."""
        for group in groups:
            self._switchboard.add(group, sink)
        self._groups_changed()

    def remove_sink(self, sink: Sink, groups: tuple[str, ...]) -> None:
        """Deliver no more of these groups to `sink`."""
        for group in groups:
            self._switchboard.remove(group, sink)
        self._groups_changed()

    async def joined(self, groups: tuple[str, ...]) -> bool:
        """Wait until the broker sends us these groups; False after BROKER_TIMEOUT."""
        if not self.has_broker():
            return True
        future = self.submit(lambda: self._joined(set(groups)))
        try:
            async with asyncio.timeout(current().BROKER_TIMEOUT):
                await asyncio.wrap_future(future)
        except (TimeoutError, EngineStopped):
            return False
        return True

    def flush(self, deadline: float | None = None) -> bool:
        """Wait until nothing waits to be sent, at most `deadline` (FLUSH_DEADLINE) seconds.

        For the end of a command. Blocks: not for async code. True when all was sent or
        reported as lost.
        """
        if deadline is None:
            deadline = current().FLUSH_DEADLINE
        self._notifier.flush()
        if not self._broker.pending:
            return True
        if self._thread.is_current():
            return False  # It would wait for itself.
        future = self.submit(self._broker.drained)
        try:
            future.result(deadline)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, EngineStopped):
            future.cancel()
        return not self._broker.pending

    def stop(self) -> bool:
        """End the thread and its connections, dropping what waits; the next use starts afresh.

        For tests, and for settings that changed.
        """
        ended = self._thread.stop(STOP_TIMEOUT)
        self._notifier.forget()
        self._broker.forget()
        return ended

    def has_broker(self) -> bool:
        """Tell whether messages leave the process, by the layer CHANNEL_LAYER (see `reach`)."""
        return reach.crosses_processes(self._layer())

    def link_is_good(self) -> bool:
        """Tell whether the broker's wake-ups come in, as far as the last probe tells."""
        listener = self._listener
        return listener is not None and listener.link_is_good

    # On the way.

    def _send_here(self, layer: Any, group: str, message: dict[str, Any]) -> int:
        message = {**message, "group": group}
        receivers = self._switchboard.deliver(group, message)
        if layer is not None:
            try:
                receivers += reach.post(layer, group, message)
            except Exception as error:  # noqa: BLE001  (never raised, by contract)
                self._broker.losses.add(group, 1, error)
        return receivers

    def _wake_now(self, group: str) -> None:
        message = {"type": WAKE, "group": group}
        self._switchboard.deliver(group, message)
        if self.has_broker():
            self._broker.send(group, message, key=WAKE)

    def _call_later(self, delay: float, function: Callable[[str], object], group: str) -> bool:
        return self._thread.call(self._schedule, delay, function, group)

    def _groups_changed(self) -> None:
        listener = self._listener
        if listener is not None and self._thread.running:
            self._thread.call(listener.changed)
        elif self._switchboard.groups() and self.has_broker():
            self._thread.call(_nothing)  # Starting the loop is enough: it looks first.

    @staticmethod
    def _layer() -> Any:
        return get_channel_layer(current().CHANNEL_LAYER)

    # On the engine's loop.

    def _on_start(self) -> None:
        self._broker.attach()
        self._listener = GroupListener(self._switchboard, self._broker.sender_id, self.has_broker)
        self._spawn(self._broker.run())
        self._spawn(self._listener.run())

    async def _on_stop(self) -> None:
        self._listener = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _schedule(delay: float, function: Callable[[str], object], group: str) -> None:
        asyncio.get_running_loop().call_later(delay, function, group)

    async def _joined(self, groups: set[str]) -> None:
        if self._listener is not None:
            await self._listener.joined(groups)

    # When the process changes.

    def after_fork_in_child(self) -> None:
        """Start afresh: thread, connections, messages and sinks are the parent's."""
        self._thread.after_fork_in_child(self._broker, self._listener, self._tasks)
        self._broker = Broker(self._thread.call)
        self._listener = None
        self._tasks = set()
        self._switchboard.after_fork_in_child()
        self._notifier.forget()
        in_memory.after_fork_in_child()

    def at_exit(self) -> None:
        """Send what waits if that is quickly done, close what is open, and open nothing.

        Connections that don't exist by now won't: names can't be resolved this late.
        """
        if self._thread.running:
            good = self._broker.link_is_good
            self.flush(current().FLUSH_DEADLINE if good else EXIT_GRACE)
        self._broker.close()
        self._thread.close(STOP_TIMEOUT)

    def settings_changed(self, *, setting: str, **kwargs: Any) -> None:
        """Drop what was made from the old settings (`override_settings` in tests)."""
        if setting in ("CHANNEL_LAYERS", "ECHOMQ"):
            if self._thread.running:
                self.stop()
            self._groups_changed()


def _nothing() -> None:
    pass


engine = Engine()
atexit.register(engine.at_exit)
os.register_at_fork(after_in_child=engine.after_fork_in_child)
setting_changed.connect(engine.settings_changed, dispatch_uid="echomq.engine")

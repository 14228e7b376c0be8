"""Starts the engine behind a server that is already listening, watches it, and starts it anew."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

from adapter.billing import Meter
from adapter.checkpoint import Checkpoint, load_checkpoint
from adapter.engine import Engine, start_engine
from adapter.errors import EngineDeadError, SettingsError, UnavailableError
from adapter.metrics import Metrics
from adapter.orphans import end_orphans
from adapter.processes import kill_descendants
from adapter.service import Service, Started
from adapter.settings import Settings
from adapter.usage import UsageLog

logger = logging.getLogger(__name__)

T = TypeVar("T")

Status = Literal["starting", "ok", "restarting", "failed"]

WATCH_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 30.0


def start_serving(settings: Settings) -> Started:
    """Read the checkpoint and start the engine; blocks until the weights are loaded.

    Raises SettingsError for a checkpoint that cannot be had, and what stops the engine.
    """
    end_orphans()
    logger.info("reading the checkpoint %s", settings.model)
    checkpoint = load_checkpoint(
        settings.model, settings.revision, max_model_len=settings.max_model_len
    )
    logger.info("loading the weights; this takes minutes for the real ones")
    engine, reason = start_engine(settings, checkpoint)
    return Started(checkpoint, engine, reason)


class Supervisor:
    """The engine's life. `start` and `restart` block for as long as the engine takes to start and
    run in a thread; `on_failure` is called once where nothing will ever be answered."""

    def __init__(
        self,
        settings: Settings,
        start: Callable[[Settings], Started] = start_serving,
        restart: Callable[[Settings, Checkpoint], tuple[Engine, str]] = start_engine,
        *,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._start = start
        self._restart = restart
        self._metrics = metrics
        self.meter = Meter()
        self.usage_log = UsageLog(None, None)
        self._engine: Engine | None = None
        self._settled = asyncio.Event()  # there is an engine, or there will be none
        self._starting: asyncio.Future[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths_in_row = 0
        self.num_restarts = 0
        self.service_or_none: Service | None = None
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._spawn(self._begin())

    async def stop(self) -> None:
        """End the engine, at once also where it is still starting."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._starting is not None and not self._starting.done():
            kill_descendants()  # a start cannot be cancelled, but it fails without its processes
            await asyncio.wait([self._starting], timeout=WATCH_SECONDS)
        if self.service_or_none is not None:
            await self.service_or_none.close()
        if self._engine is not None:
            await self._engine.shutdown()
        await asyncio.to_thread(self.usage_log.close)

    @property
    def service(self) -> Service:
        """The service that answers. Raises UnavailableError while there is none."""
        status = self.status()
        if self.service_or_none is None or status != "ok":
            raise self._unavailable(status)
        return self.service_or_none

    def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self._engine is not None:
            return "ok"
        return "starting" if self.service_or_none is None else "restarting"

    async def running(self) -> Engine:
        """The engine, waited for. Raises UnavailableError where there will be none."""
        await self._settled.wait()
        if self._engine is None:
            raise self._unavailable("failed")
        return self._engine

    def report_death(self, engine: Engine) -> None:
        """An engine has died: start another. Only the first report of one engine counts."""
        if engine is not self._engine:
            return
        self._engine = None
        self._settled.clear()
        self._spawn(self._revive(engine))

    def note_answer(self) -> None:
        self._deaths_in_row = 0

    def _unavailable(self, status: Status) -> UnavailableError:
        sentences = {
            "failed": f"the engine is gone: {self.failure}",
            "starting": "the engine is starting; try again in a minute",
        }
        return UnavailableError(sentences.get(status, "the engine is restarting"), code=status)

    async def _begin(self) -> None:
        try:
            self.usage_log = UsageLog.open(
                self._settings.usage_db, retention_days=self._settings.usage_retention_days
            )
            started = await self._in_thread(self._start, self._settings)
            service = Service(
                self._settings,
                started,
                self,
                meter=self.meter,
                metrics=self._metrics,
                usage_log=self.usage_log,
            )
            await service.open()
        except Exception as error:
            # Whatever stops the engine stops the server: nothing could be answered.
            reason = str(error).strip() or type(error).__name__
            logger.error(
                "the engine does not start: %s",
                reason,
                exc_info=not isinstance(error, SettingsError),
            )
            self._fail(reason)
            return
        self.service_or_none = service
        self._adopt(started.engine)
        self._spawn(self._watch())
        logger.info(
            "serving %s on %s (%s)",
            started.checkpoint.name,
            started.engine.name,
            started.engine_reason,
        )

    async def _revive(self, dead: Engine) -> None:
        """Start another engine, with longer pauses the more died without an answer between."""
        await self._bury(dead)
        service = self.service_or_none
        assert service is not None
        settings = dataclasses.replace(self._settings, engine=dead.name)
        while self._deaths_in_row < settings.max_restarts:
            await asyncio.sleep(min(2.0**self._deaths_in_row - 1, MAX_BACKOFF_SECONDS))
            self._deaths_in_row += 1
            self.num_restarts += 1
            logger.warning("restart %d in a row", self._deaths_in_row)
            try:
                engine, _ = await self._in_thread(self._restart, settings, service.checkpoint)
            except Exception:
                logger.exception("the engine does not start again")
                continue
            self._adopt(engine)
            return
        self._fail(f"{settings.max_restarts} restarts in a row brought no answer")

    async def _bury(self, engine: Engine) -> None:
        """End what is left of a dead engine."""
        try:
            await engine.shutdown()
        except Exception:
            logger.exception("a dead engine did not shut down cleanly")

    async def _watch(self) -> None:
        """Notice an engine that died between requests, or that is stuck in the middle of one."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._engine is None:
                continue
            try:
                await self._engine.check_health()
            except EngineDeadError:
                self.report_death(self._engine)
                continue
            if self._is_stuck(self._engine) and not self._engine.kill():
                self._fail("the engine is stuck and cannot be ended alone")
                return

    def _is_stuck(self, engine: Engine) -> bool:
        """Whether prompts are inside, but no step has ended for long; a busy one ends steps."""
        quiet_since = max(engine.last_progress_at(), self.meter.certain_at)
        quiet_seconds = time.monotonic() - quiet_since
        if not self.meter.num_inside or quiet_seconds < self._settings.stall_seconds:
            return False
        logger.error("no step of the engine has ended for %.0f s: ending it", quiet_seconds)
        return True

    def _adopt(self, engine: Engine) -> None:
        self._engine = engine
        self._settled.set()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self._engine = None
        self._settled.set()
        self.on_failure()

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        starting = asyncio.get_running_loop().run_in_executor(None, work, *args)
        self._starting = starting
        return await asyncio.shield(starting)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

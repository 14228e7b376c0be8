"""Starts the engine behind a server that is already listening, and knows how it fares."""

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from adapter.errors import EngineDeadError, SettingsError, UnavailableError
from adapter.service import Service, start_service
from adapter.settings import Settings

logger = logging.getLogger(__name__)

Status = Literal["starting", "ok", "failed"]


class Supervisor:
    """Holds the service while the engine lives.

    `start_service` blocks for as long as the engine takes to start; it runs in a thread.
    `on_failure` is called once where nothing will ever be answered.
    """

    def __init__(
        self, settings: Settings, start: Callable[[Settings], Service] = start_service
    ) -> None:
        self._settings = settings
        self._start = start
        self._task: asyncio.Task[None] | None = None
        self.service_or_none: Service | None = None
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the engine; one that is still starting is waited for, so that it can be ended."""
        if self._task is not None:
            await self._task
        if self.service_or_none is not None:
            await self.service_or_none.close()

    @property
    def service(self) -> Service:
        """The service that answers. Raises UnavailableError while there is none."""
        if self.service_or_none is not None:
            return self.service_or_none
        if self.failure is not None:
            raise UnavailableError(f"the engine did not start: {self.failure}", code="failed")
        raise UnavailableError("the engine is starting; try again in a minute", code="starting")

    async def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self.service_or_none is None:
            return "starting"
        try:
            await self.service_or_none.engine.check_health()
        except EngineDeadError:
            return "failed"
        return "ok"

    async def _run(self) -> None:
        try:
            service = await asyncio.to_thread(self._start, self._settings)
            await service.open()
        except Exception as error:
            # Whatever stops the engine stops the server: nothing could be answered.
            self.failure = str(error).strip() or type(error).__name__
            known = isinstance(error, SettingsError)
            logger.error("the engine does not start: %s", self.failure, exc_info=not known)
            self.on_failure()
            return
        self.service_or_none = service
        logger.info(
            "serving %s on %s (%s)",
            service.checkpoint.name,
            service.engine.name,
            service.engine_reason,
        )

"""The routes: JSON or multipart in, answers or the one form of error out.

uvicorn adapter.api:app --host 0.0.0.0 --port 8000
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from adapter import __version__, schemas
from adapter.body import add_request_schemas, openapi_request_body, read_body
from adapter.errors import AdapterError, SettingsError, UnavailableError
from adapter.service import Service, start_service
from adapter.settings import Settings, load_settings
from adapter.supervisor import Supervisor

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody is there to read it

DESCRIPTION = """\
Music Flamingo listens to a song and answers questions about it. Ask one question with
`POST /generate`, or many about the same song with `POST /generate_batch`: the song is fetched,
decoded and encoded once, and the prompts decode together. Each answer says what it cost.
"""

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorResponse, "description": description}
    for status, description in {
        413: "The body, the upload or the download is larger than its limit",
        415: "The bytes are no audio that can be decoded",
        422: "A field is missing, unknown or out of range, or the song does not fit",
        502: "The audio URL did not answer with the file",
        503: "The engine is starting or gone; see Retry-After",
        504: "The request ran out of time",
    }.items()
}


def create_app(
    settings: Settings, *, start: Callable[[Settings], Service] = start_service
) -> FastAPI:
    """The application; its engine starts with the server, in the background.

    `start` makes the service that answers (tests bring their own engine with it).
    """
    supervisor = Supervisor(settings, start)
    models = schemas.request_models(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        supervisor.start()
        yield
        await supervisor.stop()

    app = FastAPI(
        title="Music Flamingo adapter",
        description=DESCRIPTION,
        version=__version__,
        lifespan=lifespan,
    )
    app.state.supervisor = supervisor
    _add_error_handlers(app)

    async def answer(
        request: Request,
        model: type[schemas.Model],
        work: Callable[[Any, Any], Coroutine[Any, Any, BaseModel]],
    ) -> Response:
        body, upload = await read_body(
            request,
            max_json_bytes=settings.max_body_bytes,
            max_audio_bytes=settings.max_audio_bytes,
        )
        with upload or contextlib.nullcontext():
            parsed = schemas.parse(model, body, uploaded=upload is not None)
            result = await _while_connected(request, work(parsed, upload))
        return Response(result.model_dump_json(), media_type="application/json")

    @app.post(
        "/generate",
        summary="One prompt, one answer",
        response_model=schemas.Answer,
        responses=_ERRORS,
        openapi_extra=openapi_request_body(models.generate),
    )
    async def generate(request: Request) -> Response:
        return await answer(request, models.generate, supervisor.service.generate)

    @app.post(
        "/generate_batch",
        summary="Many prompts, usually about one song",
        response_model=schemas.BatchAnswer,
        responses=_ERRORS,
        openapi_extra=openapi_request_body(models.generate_batch),
    )
    async def generate_batch(request: Request) -> Response:
        return await answer(request, models.generate_batch, supervisor.service.generate_batch)

    @app.get(
        "/health",
        summary="Whether answers can be made",
        response_model=schemas.Health,
        responses={503: {"model": schemas.Health, "description": "Not now: `status` says why"}},
    )
    async def health() -> Response:
        report = await _health(supervisor, settings)
        status_code = 200 if report.status == "ok" else 503
        return JSONResponse(report.model_dump(), status_code)

    @app.get(
        "/live", summary="Whether the process can still recover", response_model=dict[str, str]
    )
    async def live() -> Response:
        failed = supervisor.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 503 if failed else 200)

    _document_requests(app, [models.generate, models.generate_batch])
    return app


async def _health(supervisor: Supervisor, settings: Settings) -> schemas.Health:
    service = supervisor.service_or_none
    return schemas.Health(
        status=await supervisor.status(),
        model=service.checkpoint.name if service else settings.model,
        engine=service.engine.name if service else None,
        engine_reason=service.engine_reason if service else supervisor.failure,
        version=__version__,
        gpu_usd_per_second=settings.rate_usd_per_second,
        rate_source=settings.rate_source,
    )


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; cancels it and raises ClientDisconnect where the client leaves first.

    FastAPI lets a handler run on when its client has left, which would go on generating.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(AdapterError)
    async def adapter_error(_: Request, error: AdapterError) -> Response:
        return _error_response(error.status, error.code, error.message, error.field, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code, message = _HTTP_ERRORS.get(error.status_code, ("http_error", str(error.detail)))
        message = message.format(method=request.method, path=request.url.path)
        response = _error_response(error.status_code, code, message, None)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, __: Exception) -> Response:
        # The last border: the server logs the traceback, the client sees none of it.
        return _error_response(500, "internal_error", "the server has a fault; see its log", None)


_HTTP_ERRORS = {
    404: ("not_found", "there is no {path} here; see /docs"),
    405: ("method_not_allowed", "{path} takes no {method}; see /docs"),
}


def _error_response(
    status_code: int,
    code: str,
    message: str,
    field: str | None,
    error: AdapterError | None = None,
) -> Response:
    body = schemas.ErrorResponse(error=schemas.ErrorBody(code=code, message=message, field=field))
    headers = {}
    if isinstance(error, UnavailableError):
        headers["Retry-After"] = str(error.retry_after_seconds)
    return JSONResponse(body.model_dump(), status_code, headers)


def _document_requests(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Add the bodies that the routes read by hand to the OpenAPI document."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            add_request_schemas(generated(), models)
        return generated()

    app.openapi = openapi  # type: ignore[method-assign]


def __getattr__(name: str) -> FastAPI:
    """`adapter.api:app`, made on first access: importing this module reads no settings."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_workers()
    try:
        return create_app(load_settings())
    except SettingsError as error:
        raise SystemExit(f"error: {error}") from None


def _refuse_workers() -> None:
    """One engine a server: uvicorn's `--workers` (and `--reload`) would start one in each."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    os.kill(parent.pid, signal.SIGTERM)  # uvicorn would replace its workers for ever
    raise SystemExit("error: one worker only, since each would start an engine of its own")

"""The routes: JSON or multipart in, answers or the one form of error out.

uvicorn adapter.api:app --host 0.0.0.0 --port 8000
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from adapter import __version__, logs, schemas, streaming
from adapter.body import add_request_schemas, openapi_request_body, read_body
from adapter.disconnect import while_connected
from adapter.engine import start_engine
from adapter.errors import (
    AdapterError,
    ForbiddenError,
    RequestTimeoutError,
    SettingsError,
    TooManyRequestsError,
    UnauthorizedError,
    UnavailableError,
    UnprocessableError,
)
from adapter.gate import Gate
from adapter.idempotency import (
    HEADER,
    REPLAYED_HEADER,
    Replies,
    Reply,
    idempotency_key,
    request_digest,
)
from adapter.intake import Intake
from adapter.keys import OPEN_PATHS, Client, KeyCheck, Keys
from adapter.logs import CLIENT_CLOSED_REQUEST, RequestLog, current_request
from adapter.metrics import EngineReading, Metrics
from adapter.page import add_page
from adapter.presets import built_in_presets
from adapter.processes import deaf_to_ctrl_c
from adapter.report import Report
from adapter.sections import SECTIONS
from adapter.service import Started
from adapter.settings import Settings, load_settings
from adapter.supervisor import Supervisor, start_serving

Result = schemas.Answer | schemas.BatchAnswer | schemas.FullReport
Work = Callable[..., Coroutine[Any, Any, Result]]  # a method of Service that answers a request

DESCRIPTION = """\
Music Flamingo listens to a song and answers questions about it. Ask one question with
`POST /generate`, or many about the same song with `POST /generate_batch`: the song is fetched,
decoded and encoded once, and the prompts decode together. Each answer says what it cost.
`POST /full_report` asks all that `GET /presets` lists. With `"stream": true` answers come as they
are written.
"""

_REQUEST_ID = {
    "X-Request-Id": {
        "schema": {"type": "string", "pattern": "^[!-~]{1,128}$"},
        "description": "What the log calls the request.",
        "required": True,
    }
}
_RETRY_AFTER = {
    "Retry-After": {
        "schema": {"type": "integer", "minimum": 1},
        "description": "Seconds after which to ask again.",
        "required": True,
    }
}
_REPLAYED = {
    REPLAYED_HEADER: {
        "schema": {"type": "string", "enum": ["true"]},
        "description": "There where the answer is that of an earlier request with this key.",
    }
}
_EVENT = {
    "type": "object",
    "description": "Each event, where `stream` is true; `data` is an object in JSON.",
    "properties": {
        "event": {"enum": ["delta", "answer", "restart", "done", "error"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
    "required": ["event", "data"],
}
_ANSWERED: dict[str, Any] = {
    "headers": _REQUEST_ID | _REPLAYED,
    "content": {"text/event-stream": {"schema": _EVENT}},
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "model": schemas.ErrorResponse,
        "description": description,
        "headers": _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {}),
    }
    for status, description in {
        401: "No API key was sent, or one that is not known",
        408: "The body came too slowly",
        413: "The body, the upload or the download is larger than its limit",
        415: "The bytes are no audio that can be decoded, or the body is neither JSON nor a form",
        422: "A field is missing, unknown or out of range, or the song does not fit",
        429: "The key has too many prompts in flight, or has used its day; see Retry-After",
        502: "The audio URL did not answer with the file",
        503: "The queue is full, or the engine is starting or gone; see Retry-After",
        504: "The request ran out of time",
    }.items()
}

_HEADERS: dict[str, Any] = {
    "parameters": [
        {
            "name": HEADER,
            "in": "header",
            "schema": {"type": "string", "pattern": "^[!-~]([ -~]{0,253}[!-~])?$"},
            "description": "The same key with the same request within ten minutes gets the same "
            "answer, with `Idempotency-Replayed: true`, and is billed once.",
        },
        {
            "name": "X-Request-Id",
            "in": "header",
            "schema": {"type": "string"},
            "description": "Names the request in the log; sent back. One is made in place of none, "
            "and of one that is not 1 to 128 visible ASCII characters.",
        },
    ]
}


_CORS: dict[str, Any] = {
    "allow_methods": ["GET", "POST"],
    "allow_headers": ["Authorization", "Content-Type", HEADER, "X-Request-Id"],
    "expose_headers": ["Retry-After", REPLAYED_HEADER, "X-Request-Id"],
}


def create_app(
    settings: Settings, *, start: Callable[[Settings], Started] = start_serving
) -> FastAPI:
    """The application; its engine starts with the server, in the background.

    `start` brings the engine that answers (tests bring their own).
    """
    deaf = deaf_to_ctrl_c()
    metrics = Metrics(lambda: _read_engine(supervisor))
    supervisor = Supervisor(settings, deaf(start), deaf(start_engine), metrics=metrics)
    gate = Gate()
    replies: defaultdict[str | None, Replies] = defaultdict(Replies)  # of each key
    intake = Intake(
        max_bytes=settings.max_bodies_bytes,
        timeout_seconds=settings.body_timeout_seconds,
        max_seconds=settings.request_timeout_seconds,
    )
    models = schemas.request_models(settings)
    listed = _list_presets(settings)

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
        redirect_slashes=False,
    )
    app.state.supervisor = supervisor
    app.state.gate = gate
    app.state.metrics = metrics
    app.add_middleware(
        KeyCheck,
        keys=Keys(settings.api_keys, cache_scope=settings.cache_scope),
        refuse=lambda error: _refusal(metrics, error),
    )
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, **_CORS)
    app.add_middleware(
        RequestLog, ended=metrics.request_ended, fault=lambda: _fault_response(metrics)
    )
    _add_error_handlers(app, metrics)

    async def answer(request: Request, model: type[schemas.Model], work: Work) -> Response:
        client: Client = request.state.client
        key = idempotency_key(request.headers.getlist(HEADER))
        with contextlib.ExitStack() as held:
            held.enter_context(gate.enter())
            files = held.enter_context(contextlib.ExitStack())
            receive = files.enter_context(intake.body(request.receive))
            with supervisor.service.quotas.receive(client.name):
                body, upload = await read_body(
                    Request(request.scope, receive),
                    max_json_bytes=settings.max_body_bytes,
                    max_audio_bytes=settings.max_audio_bytes,
                )
            if upload is not None:
                files.enter_context(upload)

            async def make(tell: streaming.Tell | None = None) -> Result:
                parsed = schemas.parse(model, body, uploaded=upload is not None)
                _note_prompts(parsed, settings)
                result = await work(parsed, upload, client, tell)
                _note_errors(metrics, result)
                return result

            if isinstance(body, dict) and body.get("stream") is True:
                _refuse_key(key)
                events = streaming.EventStream(make)
                await while_connected(request.receive, events.begin())
                events.hold(held.pop_all())
                return events
            if key is None:
                result = await while_connected(request.receive, make())
                return _response(_reply(result), replayed=False)
            digest = await asyncio.to_thread(request_digest, request.url.path, body, upload)
            reply, replayed = await while_connected(
                request.receive,
                replies[client.name].reply(
                    key,
                    digest,
                    lambda: _with_refusals(metrics, make()),
                    files,
                ),
            )
            return _response(reply, replayed=replayed)

    @app.post(
        "/generate",
        summary="One prompt, one answer",
        response_model=schemas.Answer,
        responses={200: _ANSWERED, **_ERRORS},
        openapi_extra=openapi_request_body(models.generate) | _HEADERS,
    )
    async def generate(request: Request) -> Response:
        return await answer(request, models.generate, supervisor.service.generate)

    @app.post(
        "/generate_batch",
        summary="Many prompts, usually about one song",
        response_model=schemas.BatchAnswer,
        responses={200: _ANSWERED, **_ERRORS},
        openapi_extra=openapi_request_body(models.generate_batch) | _HEADERS,
    )
    async def generate_batch(request: Request) -> Response:
        return await answer(request, models.generate_batch, supervisor.service.generate_batch)

    @app.post(
        "/full_report",
        summary="The report of a song: many questions with their forms, and measurements",
        response_model=schemas.FullReport,
        responses={200: _ANSWERED, **_ERRORS},
        openapi_extra=openapi_request_body(models.full_report, with_song=True) | _HEADERS,
    )
    async def full_report(request: Request) -> Response:
        return await answer(request, models.full_report, supervisor.service.full_report)

    @app.head("/presets", include_in_schema=False)
    @app.get(
        "/presets",
        summary="The questions that a prompt may name",
        response_model=schemas.Presets,
        responses={200: {"headers": _REQUEST_ID}, 401: _ERRORS[401]},
    )
    async def presets() -> Response:
        return JSONResponse(listed)

    @app.head("/health", include_in_schema=False)
    @app.get(
        "/health",
        summary="Whether answers can be made",
        response_model=schemas.Health,
        responses={
            200: {"headers": _REQUEST_ID},
            503: {
                "model": schemas.Health,
                "description": "Not now: `status` says why",
                "headers": _REQUEST_ID,
            },
        },
    )
    async def health() -> Response:
        report = _health(supervisor, settings, gate)
        status_code = 200 if report.status == "ok" else 503
        return JSONResponse(report.model_dump(), status_code)

    @app.head("/live", include_in_schema=False)
    @app.get(
        "/live",
        summary="Whether the process can still recover",
        response_model=schemas.Live,
        responses={
            200: {"headers": _REQUEST_ID},
            503: {
                "model": schemas.Live,
                "description": "It cannot: start it anew",
                "headers": _REQUEST_ID,
            },
        },
    )
    async def live() -> Response:
        report = schemas.Live(status="ok" if supervisor.failure is None else "failed")
        return JSONResponse(report.model_dump(), 200 if report.status == "ok" else 503)

    @app.head("/metrics", include_in_schema=False)
    @app.get(
        "/metrics",
        summary="Numbers for Prometheus",
        response_class=PlainTextResponse,
        responses={
            200: {
                "headers": _REQUEST_ID,
                "content": {
                    "text/plain": {"schema": {"type": "string"}},
                    "application/openmetrics-text": {"schema": {"type": "string"}},
                },
            },
            401: _ERRORS[401],
            403: {
                "model": schemas.ErrorResponse,
                "description": "The API key may not read them",
                "headers": _REQUEST_ID,
            },
        },
    )
    async def scrape(request: Request) -> Response:
        name = request.state.client.name
        if name is not None and settings.metrics_keys and name not in settings.metrics_keys:
            raise ForbiddenError("this API key may not read /metrics; ask for one that may")
        text, content_type = metrics.expose(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    add_page(app)
    # The sections beside them, so that a client can make types of what `data` holds.
    requests = [models.generate, models.generate_batch, models.full_report]
    _document_requests(app, [*requests, *SECTIONS.values()])
    if settings.api_keys:
        _document_keys(app)
    return app


def _list_presets(settings: Settings) -> dict[str, Any]:
    presets = settings.presets or built_in_presets()
    names = schemas.PresetInfo.model_fields
    infos = [schemas.PresetInfo(**{name: getattr(one, name) for name in names}) for one in presets]
    return schemas.Presets(presets=infos).model_dump()


def _health(supervisor: Supervisor, settings: Settings, gate: Gate) -> schemas.Health:
    service = supervisor.service_or_none
    status = supervisor.status()
    return schemas.Health(
        status="draining" if gate.draining and status != "failed" else status,
        model=service.checkpoint.name if service else settings.model,
        engine=service.engine_name if service else None,
        engine_reason=service.engine_reason if service else supervisor.failure,
        version=__version__,
        gpu_usd_per_second=settings.rate_usd_per_second,
        rate_source=settings.rate_source,
        usage_log=supervisor.usage_log.status,
    )


def _read_engine(supervisor: Supervisor) -> EngineReading:
    service, meter = supervisor.service_or_none, supervisor.meter
    return EngineReading(
        engine=service.engine_name if service else "",
        model=service.checkpoint.name if service else "",
        busy_seconds=meter.busy_seconds,
        lost_seconds=meter.lost_seconds,
        num_requests_running=meter.num_inside,
        num_requests_waiting=service.scheduler.turns.num_waiting if service else 0,
        num_restarts=supervisor.num_restarts,
    )


def _note_prompts(parsed: BaseModel, settings: Settings) -> None:
    record = current_request()
    if record is not None:
        asked = (
            Report(parsed, settings) if isinstance(parsed, schemas.FullReportRequest) else parsed
        )
        record.num_prompts = len(getattr(asked, "prompts", "1"))


def _note_errors(metrics: Metrics, result: Result) -> None:
    for answer in _answers(result):
        if answer.error is not None:
            metrics.error_told(answer.error.code)


def _answers(result: Result) -> Sequence[schemas.Answer]:
    if isinstance(result, schemas.FullReport):
        return result.sections
    return result.answers if isinstance(result, schemas.BatchAnswer) else [result]


def _reply(result: Result) -> Reply:
    return Reply(200, result.model_dump_json().encode())


def _refuse_key(key: str | None) -> None:
    if key is not None:
        raise UnprocessableError(
            f"{HEADER} comes with stream, whose answers are not kept; send one of the two",
            code="invalid_value",
            field=HEADER,
        )


_MAY_PASS = {408, 429}


async def _with_refusals(metrics: Metrics, making: Coroutine[Any, Any, Result]) -> Reply:
    """A refusal that would come again as a reply, so that it can be kept; the rest is raised."""
    try:
        return _reply(await making)
    except AdapterError as error:
        if error.status in _MAY_PASS or error.status >= 500:
            raise
        metrics.error_told(error.code)
        body = schemas.ErrorResponse(
            error=schemas.ErrorBody(code=error.code, message=error.message, field=error.field)
        )
        return Reply(error.status, body.model_dump_json().encode())


def _response(reply: Reply, *, replayed: bool) -> Response:
    response = Response(reply.body, reply.status, media_type="application/json")
    if replayed:
        response.headers[REPLAYED_HEADER] = "true"
        record = current_request()
        if record is not None:
            record.replayed = True
    return response


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    @app.exception_handler(AdapterError)
    async def adapter_error(_: Request, error: AdapterError) -> Response:
        return _refusal(metrics, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code, message = _HTTP_ERRORS.get(error.status_code, ("http_error", str(error.detail)))
        message = message.format(method=request.method, path=request.url.path)
        metrics.error_told(code)
        response = _error_response(error.status_code, code, message, None)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = _allowed_methods(request)
        return response

    @app.exception_handler(ClientDisconnect)
    async def client_left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _allowed_methods(request: Request) -> str:
    """Of all routes with this path: Starlette names those of the first alone."""
    routes = (route for route in request.app.routes if isinstance(route, Route))
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in matching for method in route.methods or ()}))


_HTTP_ERRORS = {
    404: ("not_found", "there is no {path} here; see /docs"),
    405: ("method_not_allowed", "{path} takes no {method}; see /docs"),
}


def _refusal(metrics: Metrics, error: AdapterError) -> Response:
    metrics.error_told(error.code)
    return _error_response(error.status, error.code, error.message, error.field, error)


def _fault_response(metrics: Metrics) -> Response:
    metrics.error_told("internal_error")
    return _error_response(500, "internal_error", "the server has a fault; see its log", None)


def _error_response(
    status_code: int,
    code: str,
    message: str,
    field: str | None,
    error: AdapterError | None = None,
) -> Response:
    body = schemas.ErrorResponse(error=schemas.ErrorBody(code=code, message=message, field=field))
    return JSONResponse(body.model_dump(), status_code, _error_headers(error))


def _error_headers(error: AdapterError | None) -> dict[str, str]:
    if isinstance(error, UnavailableError | TooManyRequestsError):
        return {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, UnauthorizedError):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RequestTimeoutError):
        return {"Connection": "close"}  # or the rest of the body would be read as slowly
    return {}


def _document_requests(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Add the bodies that the routes read by hand to the OpenAPI document."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            add_request_schemas(generated(), models)
        return generated()

    app.openapi = openapi  # type: ignore[method-assign]


def _document_keys(app: FastAPI) -> None:
    """Say in the OpenAPI document which routes want a key, so that /docs can send one."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        document = generated()
        schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
        for path, operations in document["paths"].items():
            for operation in operations.values() if path not in OPEN_PATHS else ():
                operation["security"] = [{"key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def __getattr__(name: str) -> FastAPI:
    """`adapter.api:app`, made on first access: importing this module reads no settings."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _refuse_workers()
    try:
        settings = load_settings()
        logs.configure(settings.log_level, settings.log_format)
        application = create_app(settings)
    except SettingsError as error:
        raise SystemExit(f"error: {error}") from None
    # Under a plain uvicorn nobody else ends a server that will never answer.
    application.state.supervisor.on_failure = lambda: signal.raise_signal(signal.SIGTERM)
    return application


def _refuse_workers() -> None:
    """One engine a server: uvicorn's `--workers` (and `--reload`) would start one in each."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    os.kill(parent.pid, signal.SIGTERM)  # uvicorn would replace its workers for ever
    raise SystemExit("error: one worker only, since each would start an engine of its own")

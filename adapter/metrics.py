"""What `/metrics` shows: counters of our own, the meter as it stands, and vLLM's numbers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from adapter import __version__
from adapter.logs import RequestRecord, current_request
from adapter.request import FinishReason

Outcome = Literal["answered", "failed", "aborted", "deadline_exceeded"]

QUEUE_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600)


def outcome_of(ended: str) -> Outcome:
    """What a prompt came to, from its finish reason, its error's code, or "aborted"."""
    if ended in get_args(FinishReason):
        return "answered"
    if ended == "aborted":
        return "aborted"
    return "deadline_exceeded" if ended == "deadline_exceeded" else "failed"


@dataclass(frozen=True, slots=True)
class EngineReading:
    """The engine's side at one moment; `engine` and `model` are empty while there is none."""

    engine: str = ""
    model: str = ""
    busy_seconds: float = 0.0
    lost_seconds: float = 0.0
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_restarts: int = 0


class Metrics:
    """The numbers of one application. `read_engine` is asked at each scrape."""

    def __init__(self, read_engine: Callable[[], EngineReading]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "adapter_requests", "Requests", ["route", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "adapter_request_seconds",
            "Time from a request's head to the end of its answer",
            ["route"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._prompts = Counter("adapter_prompts", "Prompts", ["outcome"], registry=registry)
        self._billed_seconds = Counter(
            "adapter_billed_seconds",
            "Shares of the engine's time of the prompts that left it",
            ["outcome"],
            registry=registry,
        )
        self._errors = Counter(
            "adapter_errors",
            "Errors that a client was told, in place of an answer or in a batch",
            ["code"],
            registry=registry,
        )
        self._queue_seconds = Histogram(
            "adapter_queue_seconds",
            "Wait of a prompt between its finished input and the engine",
            buckets=QUEUE_BUCKETS,
            registry=registry,
        )
        self._audio_seconds = Counter(
            "adapter_audio_seconds", "Length of the songs that were decoded", registry=registry
        )
        self._heard_seconds = Counter(
            "adapter_heard_seconds", "Length of what the prompts heard", registry=registry
        )
        self._tokens = Counter(
            "adapter_tokens", "Tokens of prompts that left", ["kind"], registry=registry
        )
        for outcome in get_args(Outcome):  # a series that starts at 0 has a rate from the first
            self._prompts.labels(outcome)
            self._billed_seconds.labels(outcome)
        build = Gauge("adapter_build_info", "Always 1", ["version"], registry=registry)
        build.labels(__version__).set(1)
        registry.register(_EngineCollector(read_engine))
        ProcessCollector(registry=registry)

    def prompt_ended(
        self,
        outcome: Outcome,
        *,
        elapsed_seconds: float,
        cost_usd: float,
        queue_seconds: float | None = None,
        heard_seconds: float = 0.0,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> None:
        """A prompt is answered or given up; called once for each, in its request's context.

        `queue_seconds` is None for a prompt that never came to the engine.
        """
        self._prompts.labels(outcome).inc()
        self._billed_seconds.labels(outcome).inc(elapsed_seconds)
        self._heard_seconds.inc(heard_seconds)
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("cached").inc(cached_tokens)
        self._tokens.labels("completion").inc(completion_tokens)
        if queue_seconds is not None:
            self._queue_seconds.observe(queue_seconds)
        record = current_request()
        if record is not None:
            record.outcomes[outcome] += 1
            record.engine_seconds += elapsed_seconds
            record.cost_usd += cost_usd
            record.queue_seconds = max(record.queue_seconds, queue_seconds or 0.0)

    def song_loaded(self, duration_seconds: float) -> None:
        """A song was decoded; called once for each, in its request's context."""
        self._audio_seconds.inc(duration_seconds)
        record = current_request()
        if record is not None:
            record.audio_seconds += duration_seconds

    def error_told(self, code: str) -> None:
        self._errors.labels(code).inc()

    def request_ended(self, record: RequestRecord) -> None:
        self._requests.labels(record.route, str(record.status)).inc()
        self._request_seconds.labels(record.route).observe(record.wall_seconds)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """The text of a scrape and its Content-Type, as the Accept header asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineCollector(Collector):
    """Reads what lives elsewhere, all of it at one moment."""

    def __init__(self, read: Callable[[], EngineReading]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []  # or the registry would ask for a reading to learn the names

    def collect(self) -> Iterable[Metric]:
        reading = self._read()
        for name, help, value in (
            (
                "adapter_engine_busy_seconds",
                "Seconds in which the engine had at least one prompt",
                reading.busy_seconds,
            ),
            (
                "adapter_lost_seconds",
                "Seconds of dead engines after their last output, billed to nobody",
                reading.lost_seconds,
            ),
            ("adapter_engine_restarts", "Engines started after one died", reading.num_restarts),
        ):
            yield CounterMetricFamily(name, help, value)
        yield GaugeMetricFamily(
            "adapter_num_requests_running", "Prompts in the engine", reading.num_requests_running
        )
        yield GaugeMetricFamily(
            "adapter_num_requests_waiting",
            "Prompts that wait for the engine",
            reading.num_requests_waiting,
        )
        if reading.engine:
            names = {"engine": reading.engine, "model": reading.model}
            yield InfoMetricFamily("adapter_engine", "The engine that answers", names)
        if reading.engine == "vllm":
            yield from _vllm_metrics()


def _vllm_metrics() -> Iterable[Metric]:
    """vLLM keeps its numbers in prometheus_client's own registry, beside others."""
    return (metric for metric in REGISTRY.collect() if metric.name.startswith("vllm:"))

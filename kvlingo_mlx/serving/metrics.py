"""What Prometheus is told: counts and times of requests, and what the engine holds.

Labels are names that the server itself knows, never texts of a client's.
"""

import logging
import time
from collections.abc import Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlingo_mlx.serving.engine_thread import EngineThread
from kvlingo_mlx.serving.messages import Event, Finished, FirstToken, Status, Usage

log = logging.getLogger("kvlingo_mlx.serving")

SWITCHES = ("translate", "hybrid", "reread")  # strategies by which another model takes over
TO_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
disable_created_metrics()  # a series for each one, which says since when it is counted
PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.5, 1)


COUNTERS = {  # by the name after kvlingo_: what is counted, and the labels
    "requests": ("Requests by the status that ended them; 499: the client left.",
                 ("endpoint", "model", "status")),
    "switches": ("Answers for which another model's line was taken over, or read anew.",
                 ("model", "strategy")),
    "fallbacks": ("Answers for which tokens were read that could not be translated.", ("model",)),
    "doubts": ("Answers whose translation the guard found in doubt.", ("model",)),
    "prompt_tokens": ("Prompt tokens by where they came from.", ("model", "source")),
    "completion_tokens": ("Tokens of answers.", ("model",)),
}  # fmt: skip


class Metrics:
    """The numbers of one server, in a registry of its own."""

    def __init__(self, engine: EngineThread) -> None:
        self._registry = own = CollectorRegistry()
        self.counters = {
            name: Counter(f"kvlingo_{name}", told, labels, registry=own)
            for name, (told, labels) in COUNTERS.items()
        }
        self._to_first = Histogram(
            "kvlingo_time_to_first_token_seconds", "From a request's receipt to its first token.",
            ("model", "strategy"), buckets=TO_FIRST, registry=own,
        )  # fmt: skip
        self._per_token = Histogram(
            "kvlingo_time_per_token_seconds", "Mean time of an answer's later tokens.",
            ("model",), buckets=PER_TOKEN, registry=own,
        )  # fmt: skip
        own.register(_Held(engine))

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        self.counters[name].labels(*labels).inc(by)

    def text(self) -> bytes:
        """All numbers in Prometheus' text form."""
        return generate_latest(self._registry)

    def begun(self, model: str, usage: Usage, seconds: float) -> None:
        """Count an answer's first token, so many seconds after its request came."""
        self._to_first.labels(model, usage.strategy).observe(seconds)
        if usage.strategy in SWITCHES:
            self.count("switches", model, usage.strategy)
        if usage.fallback is not None:
            self.count("fallbacks", model)
        if usage.doubt is not None:
            self.count("doubts", model)
        for source in ("cached", "translated", "read"):
            self.count("prompt_tokens", model, source, by=getattr(usage, f"{source}_tokens"))

    def ended(self, model: str, usage: Usage, seconds: float) -> None:
        """Count a whole answer, so many seconds after its first token."""
        self.count("completion_tokens", model, by=usage.completion_tokens)
        if usage.completion_tokens > 1:
            self._per_token.labels(model).observe(seconds / (usage.completion_tokens - 1))


class HttpExchange:
    """One request over HTTP, as far as the endpoint knows more of it than its response's status."""

    def __init__(self, metrics: Metrics) -> None:
        self.model = "-"  # the label of the model that answers; "-" where none is asked for
        self.status = 0  # what ended it; 0 for the response's
        self._metrics, self._from = metrics, time.perf_counter()

    def take(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self.model = event.model
            self._metrics.begun(self.model, event.usage, self._lap())
        elif isinstance(event, Finished):
            self._metrics.ended(self.model, event.usage, self._lap())

    def _lap(self) -> float:
        now = time.perf_counter()
        passed, self._from = now - self._from, now
        return passed


class _Held(Collector):
    """What the engine's thread and last status say, read when Prometheus asks."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, status = self._engine, self._engine.status or Status()
        weights = sum(model.weights_bytes for model in status.models if model.loaded)
        held = {"weights": weights, "lines": status.lines_bytes}
        held |= {"translators": status.translators_bytes, "budget": status.budget_bytes}
        places = dict(zip(("memory", "disk"), status.conversations, strict=True))
        loaded = {model.name: model.loaded for model in status.models}
        told = "Bytes of memory; budget is what they may take together."
        counter, gauge = CounterMetricFamily, GaugeMetricFamily
        yield counter("kvlingo_worker_restarts", "Starts after a crash.", engine.restarts)
        yield counter("kvlingo_healed_tokens", "Read in place of translations.", status.healed)
        yield gauge("kvlingo_worker_ready", "Whether models can answer.", engine.status is not None)
        yield gauge("kvlingo_waiting", "Requests without a token yet.", engine.waiting)
        yield gauge("kvlingo_running", "Answers that are being written.", status.running)
        yield gauge("kvlingo_queued", "Requests that wait in the engine.", status.queued)
        yield _labelled("memory_bytes", told, held, "kind")
        yield _labelled("conversations", "Conversations that are kept.", places, "place")
        yield _labelled("model_loaded", "Whether its weights are in memory.", loaded, "model")


def _labelled(name: str, told: str, numbers: Mapping[str, float], label: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvlingo_{name}", told, labels=(label,))
    for value, number in numbers.items():
        family.add_metric((value,), float(number))
    return family


class Tally:
    """Counts every request when it has ended; its endpoint finds it in the scope."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        sent = 0

        async def noting(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
            await send(message)

        exchanged = scope["kvlingo"] = HttpExchange(self._metrics)
        try:
            await self._app(scope, receive, noting)
        finally:
            status = exchanged.status or sent or 500
            endpoint = self._endpoint(scope["path"])
            self._metrics.count("requests", endpoint, exchanged.model, str(status))
            told = exchanged.status != 0 or endpoint == "/health"
            if status >= 400 and not told:  # without the message, which may quote a prompt
                log.info("%s %s was refused: %d", scope["method"], endpoint, status)

    def _endpoint(self, path: str) -> str:
        """The path as a label, of which there are few."""
        if path.startswith("/v1/models/"):
            return "/v1/models/{id}"
        return path if path in self._paths else "other"

"""The HTTP application: which path leads where, and how events become responses.

An API's own form of requests and answers is in :mod:`.wire`; nothing here knows it.
"""

import dataclasses
import datetime
import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvlingo_mlx.serving.engine_thread import EngineThread
from kvlingo_mlx.serving.guard import RETRY_S, Gate, error_handlers, read_json
from kvlingo_mlx.serving.messages import Failure, GenerationRequest, ModelInfo
from kvlingo_mlx.serving.metrics import HttpExchange, Metrics, Tally
from kvlingo_mlx.serving.replies import FALLBACK, LEFT_OUT, STRATEGY, Reply
from kvlingo_mlx.serving.settings import Settings
from kvlingo_mlx.serving.wire import Refused, anthropic, chat, responses
from kvlingo_mlx.serving.wire.requests import Api
from kvlingo_mlx.version import __version__

APIS = (chat.API, chat.COMPLETIONS, anthropic.API, responses.API, anthropic.COUNT)
BY_PATH = {path: api for api in APIS for path in api.paths}
DEFAULT = "default_model"  # what mlx-lm's server calls the first model, and takes none given for
BEGAN = datetime.datetime.now(datetime.UTC)
PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"/": "index.html", "/page/chat.js": "chat.js", "/page/chat.css": "chat.css"}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build(settings: Settings, engine: EngineThread) -> ASGIApp:
    """The application, over an engine that somebody else starts and stops."""
    endpoints = _Endpoints(settings, engine)
    routes = endpoints.routes()
    paths = frozenset(route.path for route in routes)
    middleware = [Middleware(Tally, metrics=endpoints.metrics, paths=paths)]
    if settings.cors:
        exposed = (STRATEGY, FALLBACK, LEFT_OUT, "retry-after")
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=settings.cors, allow_methods=("GET", "POST"),
                allow_headers=("*",), expose_headers=exposed,
            )  # type: ignore[arg-type] # starlette's own stubs do not match its classes
        )  # fmt: skip
    forms = {path: api.error for path, api in BY_PATH.items()}
    middleware.append(Middleware(Gate, settings=settings, forms=forms))
    asked = ", ".join(api.paths[0] for api in APIS)
    handlers = error_handlers(forms, f"POST to {asked}; GET /v1/models")
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class _Endpoints:
    def __init__(self, settings: Settings, engine: EngineThread) -> None:
        self.settings, self.engine, self.metrics = settings, engine, Metrics(engine)

    def routes(self) -> list[Route]:
        """Which path leads where; a name of a model may have slashes."""

        def post(path: str, endpoint: Any) -> Route:
            return Route(path, endpoint, methods=["POST"])

        return [
            *(post(p, functools.partial(self.answer, api)) for p, api in BY_PATH.items()),
            *(Route(path, self.models) for path in ("/v1/models", "/models")),
            post("/v1/models/{name:path}/load", functools.partial(self.hold, "load")),
            post("/v1/models/{name:path}/unload", functools.partial(self.hold, "unload")),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/status", self.status),
            Route("/health", self.health),
            Route("/health/live", self.live),
            Route("/metrics", self.numbers),
            *(Route(path, self.page) for path in PAGE_FILES),
        ]

    async def answer(self, api: Api, request: Request) -> ASGIApp:
        answer = api.read(await read_json(request, self.settings))
        answer.ask = self._admitted(answer.ask, request.scope["kvlingo"])
        return Reply(self.engine, api, answer, self.settings.keep_alive)

    def _admitted(self, ask: GenerationRequest, exchanged: HttpExchange) -> GenerationRequest:
        """Refuse a request for which there is no model, no engine or no room."""
        names = self.settings.names
        if ask.model == DEFAULT and DEFAULT not in names:
            ask = dataclasses.replace(ask, model=names[0])
        _check_name(ask.model, names)
        exchanged.model = ask.model
        if why := self.engine.unready():
            raise Refused(why)
        if (waiting := self.engine.waiting) >= self.settings.queue_limit:
            message = f"{waiting} requests wait already, as many as may; try again later"
            raise Refused(Failure("busy", message))
        return ask

    def _infos(self) -> dict[str, ModelInfo | None]:
        status = self.engine.status
        known = {} if status is None else {m.name: m for m in status.models}
        return {name: known.get(name) for name in self.settings.names}

    async def models(self, request: Request) -> Response:
        """All models, in a form that the clients of both APIs read."""
        data = [_model(name, info) for name, info in self._infos().items()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})

    async def model(self, request: Request) -> Response:
        """One model; all of them where the path ends without a name."""
        if not (name := request.path_params["name"].rstrip("/")):
            return await self.models(request)
        infos = self._infos()
        _check_name(name, infos)
        return JSONResponse(_model(name, infos[name]))

    async def hold(self, verb: str, request: Request) -> Response:
        """Load or unload a model's weights; it goes on when the client leaves."""
        name = request.path_params["name"]
        _check_name(name, self.settings.models)
        request.scope["kvlingo"].model = name
        event = await self.engine.request(verb, name).last()
        if isinstance(event, Failure):
            raise Refused(event)
        info = self._infos().get(name)  # a status may still be on its way
        info = info and dataclasses.replace(info, loaded=verb == "load")
        return JSONResponse(_model(name, info))

    async def live(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def health(self, request: Request) -> Response:
        """Whether requests would be answered."""
        if why := self.engine.unready():
            told = {"status": "unavailable", "message": why.message}
            return JSONResponse(told, 503, {"retry-after": RETRY_S})
        return JSONResponse({"status": "ok"})

    async def numbers(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def status(self, request: Request) -> Response:
        """What the engine holds and does: the fields of :class:`Status`, and more."""
        engine, status = self.engine, self.engine.status
        told = {
            "version": __version__,
            "ready": status is not None,
            "waiting": engine.waiting,
            "restarts": engine.restarts,
            "worker": None if status is None else dataclasses.asdict(status),
        }
        return JSONResponse(told)

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE / PAGE_FILES[request.url.path], headers=PAGE_HEADERS)


def _check_name(name: str, names: Collection[str]) -> None:
    if name not in names:
        message = f"model {name!r:.80} is not offered; offered are {', '.join(names)}"
        raise Refused(Failure("not_found", message, "model"))


def _model(name: str, info: ModelInfo | None) -> dict[str, Any]:
    """A model as OpenAI's and Anthropic's clients read it, made when this server began."""
    told: dict[str, Any] = {
        "id": name, "object": "model", "created": int(BEGAN.timestamp()),
        "owned_by": "kvlingo-mlx", "type": "model", "display_name": name,
        "created_at": f"{BEGAN:%Y-%m-%dT%H:%M:%SZ}",
    }  # fmt: skip
    if info is not None:
        told["kvlingo"] = {k: v for k, v in dataclasses.asdict(info).items() if k != "name"}
    return told

"""The HTTP API's endpoints, and what every response has: a request id, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc.aio
import orjson
from aiohttp import web

from gateway.auth import Tenants
from gateway.config import Config
from gateway.openai.body import read_body
from gateway.openai.chat import ChatForm
from gateway.openai.completions import CompletionsForm
from gateway.openai.continuation import Continuation
from gateway.openai.errors import ErrorReply, reply_of
from gateway.openai.form import Form
from gateway.openai.generate import Generation
from gateway.openai.request_id import REQUEST_ID_HEADER, RequestName, keyed_name_of, name_of
from gateway.requests import RemoteRequests
from services.protocol.events import AbortOutcome
from services.runtime.errors import InternalError, NotFound, TailraceError, from_rpc_error
from services.runtime.log import get_logger
from tailrace.v1 import generation_pb2

FORMS: Mapping[str, Form] = {form.letter: form for form in (ChatForm(), CompletionsForm())}
NAME = web.RequestKey("name", RequestName)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_logger("gateway")


class Api:
    """The endpoints over a `RemoteRequests`; `not_ready` says why no request can be served, or ""."""

    def __init__(
        self, requests: RemoteRequests, *, tenants: Tenants, config: Config, not_ready: Callable[[], str]
    ) -> None:
        self._requests = requests
        self._tenants = tenants
        self._config = config
        self._not_ready = not_ready

    def application(self) -> web.Application:
        """The aiohttp application."""
        # One byte more than may come, so that the limit itself is still read.
        app = web.Application(client_max_size=self._config.body_max_bytes + 1, middlewares=[web.middleware(_answered)])
        app.on_response_prepare.append(_add_request_id)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._generation(ChatForm())),
                web.post("/v1/completions", self._generation(CompletionsForm())),
                web.get("/v1/requests/{id}/events", self._events),
                web.delete("/v1/requests/{id}", self._abort),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
            ]
        )
        return app

    def _generation(self, form: Form) -> Handler:
        async def generate(http: web.Request) -> web.StreamResponse:
            tenant = self._tenant(http)
            name = http[NAME] = keyed_name_of(http.headers) or http[NAME]
            body = await read_body(http, timeout_s=self._config.body_timeout_s, max_bytes=self._config.body_max_bytes)
            call = form.read(body, name.request_id)
            try:
                return await Generation(http, form, call, name).serve(self._requests, tenant)
            except TailraceError as error:
                return _error_response(reply_of(error, call.names))

        return generate

    async def _events(self, http: web.Request) -> web.StreamResponse:
        tenant = self._tenant(http)
        request_id = http.match_info["id"]
        http[NAME] = RequestName(request_id, named=True)
        return await Continuation(http, request_id, FORMS).serve(self._requests, tenant)

    async def _abort(self, http: web.Request) -> web.Response:
        tenant = self._tenant(http)
        request_id = http.match_info["id"]
        outcome = await self._requests.abort(request_id, tenant=tenant, wait_until_released=False)
        if outcome is AbortOutcome.NOT_FOUND:
            raise NotFound(f"request {request_id!r}")
        return _json({"id": request_id, "object": "request", "outcome": outcome.name.lower()})

    async def _models(self, http: web.Request) -> web.Response:
        self._tenant(http)
        return _json({"object": "list", "data": [_model_object(model) for model in await self._served()]})

    async def _model(self, http: web.Request) -> web.Response:
        self._tenant(http)
        name = http.match_info["id"]
        for model in await self._served():
            if model.model_id == name:
                return _json(_model_object(model))
        raise NotFound(f"model {name!r}")

    async def _health(self, http: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def _ready(self, http: web.Request) -> web.Response:
        why = self._not_ready()
        return _json({"status": "not ready", "why": why}, status=503) if why else _json({"status": "ready"})

    async def _served(self) -> list[generation_pb2.Model]:
        return list((await self._requests.list_models()).models)

    def _tenant(self, http: web.Request) -> str:
        return self._tenants.name_of(http.headers.get("Authorization"))


async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id, and every failure a body in OpenAI's form."""
    request[NAME] = name_of(request.headers)
    try:
        return await handler(request)
    except TailraceError as error:
        return _error_response(reply_of(error))
    except grpc.aio.AioRpcError as error:
        return _error_response(reply_of(from_rpc_error(error)))
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        raise  # the caller left while it was written to
    except Exception:  # noqa: BLE001  # the edge: everything else is a bug of ours, and is answered as one
        _log.exception("request failed", request_id=request[NAME].request_id, path=request.path)
        return _error_response(reply_of(InternalError("internal error; the server's log says more")))


async def _add_request_id(http: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = http[NAME].request_id


def _model_object(model: generation_pb2.Model) -> dict[str, Any]:
    return {
        "id": model.model_id,
        "object": "model",
        "created": model.created_unix_ms // 1000,
        "owned_by": "tailrace",
        "context_length": model.context_length,
    }


def _json(value: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", charset="utf-8")


def _error_response(reply: ErrorReply) -> web.Response:
    response = _json(dict(reply.body), status=reply.status)
    if reply.retry_after_s is not None:
        response.headers["Retry-After"] = str(reply.retry_after_s)
    if reply.status in (408, 413):
        response.force_close()  # the rest of the body is not waited for
    return response


def _http_error(http: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp itself refuses, such as an unknown path or method."""
    message = f"{http.method} {http.path}: {error.reason}"
    reply = {"message": message, "type": "invalid_request_error", "param": None, "code": f"http_{error.status}"}
    response = _json({"error": reply}, status=error.status)
    if allow := error.headers.get("Allow"):
        response.headers["Allow"] = allow
    return response

"""The one table of routes. It makes the routes, checks parameters and bodies, and writes `/openapi.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mulligan.servers.auth import Role
from mulligan.servers.http import live_session, operations, timeline
from mulligan.servers.http.schemas import SCHEMAS
from mulligan.servers.http.service import Answer, Asked, Service
from mulligan.values.canonical import decode
from mulligan.values.errors import MulliganError, fault

API = "/api/v1"
PAGE_MAX = 500

Schema = Mapping[str, Any]
Act = Callable[[Service, Asked], Answer]


@dataclass(frozen=True, slots=True)
class Param:
    """One value of a request. `where` is path, query or body."""

    name: str
    where: Literal["path", "query", "body"]
    schema: Schema
    required: bool = False
    default: Any = None


@dataclass(frozen=True, slots=True)
class Route:
    """`answers` names a schema for each status; `None` is bytes. `act` is None for routes that `app` answers itself."""

    method: Literal["GET", "POST"]
    path: str
    summary: str
    act: Act | None
    params: tuple[Param, ...] = ()
    answers: Mapping[int, str | None] = field(default_factory=dict)
    role: Role | None = "observer"
    media: str = "application/json"
    is_api: bool = True

    @property
    def whole_path(self) -> str:
        return API + self.path if self.is_api else self.path


_TEXT = {"type": "string", "maxLength": 4096}
_ID = {"type": "string", "minLength": 1, "maxLength": 512}
_PATHS = {"type": "array", "items": _TEXT, "maxItems": 5_000}
_HUNKS = {
    "type": "object",
    "additionalProperties": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1_000_000}},
}
_SIDE = {"type": "string", "enum": ["before", "after"]}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**53}


def _path(name: str) -> Param:
    return Param(name, "path", _ID, required=True)


def _query(name: str, schema: Schema = _TEXT, *, required: bool = False, default: Any = None) -> Param:
    return Param(name, "query", schema, required, default)


def _body(name: str, schema: Schema, *, required: bool = False, default: Any = None) -> Param:
    return Param(name, "body", schema, required, default)


def _limit(default: int, most: int = PAGE_MAX) -> Param:
    return _query("limit", {"type": "integer", "minimum": 1, "maximum": most}, default=default)


_ROOT = _query("root", _ID)
_BEFORE = _query("before", _ID)
_LINES = _query("lines", {"type": "integer", "minimum": 1, "maximum": 20_000}, default=2_000)
_FIRST_LINE = _query("line", {"type": "integer", "minimum": 1, "maximum": 2**53}, default=1)
_AT = (_query("at", _ID), _query("side", _SIDE, default="before"))
_DRY_RUN = _query("dry_run", {"type": "boolean"}, default=False)
_HOW = (
    _DRY_RUN,
    _query("on_conflict", {"type": "string", "enum": ["merge", "overwrite", "refuse"]}, default="merge"),
    _query("git", {"type": "string", "enum": ["leave", "restore"]}, default="leave"),
)
_PARTS = (_body("paths", _PATHS), _body("hunks", _HUNKS))
_CLIENT = _body("client_id", _ID, required=True)

_FAILED = {400: "Error", 401: "Error", 403: "Error", 404: "Error", 409: "Error", 413: "Error", 503: "Error"}
_UNDONE: Mapping[int, str | None] = {200: "Result", 412: "Changed"}

ROUTES: tuple[Route, ...] = (
    Route("GET", "/healthz", "The process answers.", None, answers={200: "Health"}, role=None, is_api=False),
    Route("GET", "/readyz", "The store answers.", None, answers={200: "Health", 503: "Error"}, role=None, is_api=False),
    Route(
        "GET", "/metrics", "Counters, as Prometheus text.", None, answers={200: None}, media="text/plain", is_api=False
    ),
    Route("GET", "/openapi.json", "This document.", None, answers={200: "Any"}, is_api=False),
    Route("GET", "/me", "Who asks, and what a page sends with changes.", None, answers={200: "Me"}),
    Route("GET", "/roots", "The roots.", timeline.list_roots, (_BEFORE, _limit(500)), {200: "Roots"}),
    Route(
        "GET",
        "/sessions",
        "Sessions, newest first.",
        timeline.list_sessions,
        (_ROOT, _BEFORE, _limit(100)),
        {200: "Sessions"},
    ),
    Route("GET", "/sessions/{session}", "One session.", timeline.show_session, (_path("session"),), {200: "Session"}),
    Route(
        "GET",
        "/sessions/{session}/calls",
        "Calls of a session, newest first.",
        timeline.list_calls,
        (_path("session"), _BEFORE, _limit(100)),
        {200: "Calls"},
    ),
    Route(
        "GET",
        "/sessions/{session}/events",
        "Events of a session and external edits of its files, as they happen.",
        None,
        (_path("session"), _query("after", _NUMBER)),
        {200: None},
        media="text/event-stream",
    ),
    Route(
        "GET",
        "/events",
        "Events of all roots, as they happen.",
        None,
        (_query("after", _NUMBER),),
        {200: None},
        media="text/event-stream",
    ),
    Route(
        "GET",
        "/sessions/{session}/transcript",
        "Messages, newest last; with `at`, those before a call.",
        timeline.transcript,
        (_path("session"), _query("at", _ID), _query("before", _NUMBER), _limit(100)),
        {200: "Transcript"},
    ),
    Route(
        "GET",
        "/calls",
        "Calls of a root, of a session, or of all roots, newest first.",
        timeline.list_calls,
        (_ROOT, _query("session", _ID), _query("ids", {"type": "string", "maxLength": 20_000}), _BEFORE, _limit(100)),
        {200: "Calls"},
    ),
    Route(
        "GET",
        "/calls/{call}",
        "One call with a page of its changes.",
        timeline.show_call,
        (_path("call"), _query("after"), _limit(200)),
        {200: "Call"},
    ),
    Route(
        "GET",
        "/calls/{call}/diff",
        "What a call changed, as hunks.",
        timeline.show_diff,
        (_path("call"), _query("paths", _PATHS), _LINES),
        {200: "Diff"},
    ),
    Route(
        "GET",
        "/calls/{call}/bytes",
        "A file as a call found it or left it.",
        timeline.bytes_of_call,
        (_path("call"), _query("path", required=True), _query("side", _SIDE, default="before")),
        {200: None, 410: "Error"},
        media="application/octet-stream",
    ),
    Route(
        "POST",
        "/calls/{call}/undo",
        "Undo a call.",
        operations.undo,
        (_path("call"), *_HOW, *_PARTS),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/calls/{call}/restore",
        "Put a call's files back to what they were before it.",
        operations.restore,
        (_path("call"), *_HOW, *_PARTS),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/calls/{call}/pin",
        "Keep what a call needs, or no longer.",
        operations.pin,
        (_path("call"), _body("pinned", {"type": "boolean"}, default=True)),
        {200: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/rollback",
        "Undo the last completed turn.",
        operations.rollback,
        (_path("session"), *_HOW, _body("cancel_open", {"type": "boolean"}, default=False)),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/redo",
        "Take the newest undo operation back.",
        operations.redo,
        (_path("session"), *_HOW),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/rewind",
        "Move files and transcript to a point.",
        operations.rewind,
        (
            _path("session"),
            *_HOW,
            _body("to", {"type": ["string", "integer"]}, required=True),
            _body("side", _SIDE, default="before"),
            _body("files", {"type": "boolean"}, default=True),
            _body("transcript", {"type": "boolean"}, default=True),
        ),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/fork",
        "Make a child session.",
        operations.fork,
        (
            _path("session"),
            _DRY_RUN,
            _body("at", _ID),
            _body("files", {"type": "string", "enum": ["share", "copy"]}, default="share"),
        ),
        {200: "Any", 201: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/merge",
        "Bring a fork's files back.",
        operations.merge,
        (_path("session"), *_HOW),
        _UNDONE,
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/drop",
        "Delete a fork's files.",
        operations.drop,
        (_path("session"), _DRY_RUN),
        {200: "Any"},
        "controller",
    ),
    Route(
        "GET",
        "/sessions/{session}/clients",
        "Who is attached.",
        live_session.clients,
        (_path("session"),),
        {200: "Clients"},
    ),
    Route(
        "POST",
        "/sessions/{session}/attach",
        "Attach a client, or take over.",
        live_session.attach,
        (
            _path("session"),
            _CLIENT,
            _body("mode", {"type": "string", "enum": ["observer", "controller"]}, default="observer"),
            _body("takeover", {"type": "boolean"}, default=False),
        ),
        {200: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/heartbeat",
        "A client is still there.",
        live_session.heartbeat,
        (_path("session"), _CLIENT),
        {200: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/detach",
        "A client goes.",
        live_session.detach,
        (_path("session"), _CLIENT),
        {200: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/prompt",
        "A prompt of the client in control.",
        live_session.prompt,
        (
            _path("session"),
            _CLIENT,
            _body("text", {"type": "string", "minLength": 1, "maxLength": 200_000}, required=True),
        ),
        {201: "Any"},
        "controller",
    ),
    Route(
        "POST",
        "/sessions/{session}/permissions",
        "Answer a permission request.",
        live_session.permission,
        (_path("session"), _CLIENT, _body("request", _ID, required=True), _body("option", _ID, required=True)),
        {200: "Any"},
        "controller",
    ),
    Route(
        "GET",
        "/tree",
        "The names in a folder, now or at a point.",
        timeline.show_tree,
        (_ROOT, _query("path", default="."), *_AT, _query("after"), _limit(PAGE_MAX)),
        {200: "Tree"},
    ),
    Route(
        "GET",
        "/file",
        "Lines of a file, now or at a point.",
        timeline.show_file,
        (_ROOT, _query("path", required=True), *_AT, _FIRST_LINE, _limit(1_000, 2_000)),
        {200: "File"},
    ),
    Route(
        "GET",
        "/file/bytes",
        "A file, now or at a point.",
        timeline.raw_file,
        (_ROOT, _query("path", required=True), *_AT),
        {200: None, 410: "Error"},
        media="application/octet-stream",
    ),
    Route(
        "GET",
        "/blame",
        "Which call wrote each line.",
        timeline.show_blame,
        (_ROOT, _query("path", required=True), _FIRST_LINE, _limit(1_000, 2_000)),
        {200: "File"},
    ),
    Route(
        "GET",
        "/compare",
        "The files that differ between two points, or between two roots.",
        timeline.compare,
        (
            _ROOT,
            _query("other", _ID),
            _query("from", _ID),
            _query("from_side", _SIDE, default="before"),
            _query("to", _ID, default="now"),
            _query("to_side", _SIDE, default="after"),
            _query("paths", _PATHS),
            _query("after"),
            _LINES,
        ),
        {200: "Comparison"},
    ),
    Route(
        "GET",
        "/search",
        "Prompts, transcript, paths, commands and tools that hold some words.",
        timeline.search,
        (_query("q", required=True), _ROOT, _query("session", _ID), _BEFORE, _limit(50)),
        {200: "Found"},
    ),
    Route(
        "GET",
        "/storage",
        "Sizes, caps, and what eviction would drop.",
        operations.storage,
        (_query("cap", _NUMBER), _BEFORE, _limit(100)),
        {200: "Storage"},
    ),
    Route(
        "POST",
        "/storage",
        "Set the cap of the store.",
        operations.set_cap,
        (_body("cap", {"type": "integer", "minimum": 1_048_576, "maximum": 2**53}, required=True),),
        {200: "Any"},
        "controller",
    ),
    Route("POST", "/storage/gc", "Delete what nothing names.", operations.collect, (), {202: "Any"}, "controller"),
    Route("POST", "/demo", "Make a small project with a history.", operations.demo, (), {201: "Any"}, "controller"),
)


# Reading a request.


def values_of(route: Route, path: Mapping[str, str], query: list[tuple[str, str]], body: bytes) -> dict[str, Any]:
    """The parameters as the table declares them. Raises `invalid_params`."""
    document = _document(route, body)
    known = {param.name for param in route.params}
    for name in (*document, *(name for name, _ in query)):
        if name not in known:
            raise fault("invalid_params", f"{name[:100]!r} is not a parameter here.", field=name[:100])
    found: dict[str, Any] = {}
    for param in route.params:
        texts = [path[param.name]] if param.where == "path" else [value for name, value in query if name == param.name]
        if texts:
            found[param.name] = _from_text(param, texts)
        elif param.where != "path" and param.name in document:
            found[param.name] = _checked(param.name, document[param.name], param.schema)
        elif param.required:
            raise fault("invalid_params", f"{param.name} is needed.", field=param.name)
        else:
            found[param.name] = param.default
    return found


def _document(route: Route, body: bytes) -> Mapping[str, Any]:
    """The body of a change: a JSON object, or nothing."""
    if not body:
        return {}
    try:
        found = decode(body)
    except MulliganError:
        found = None
    if not isinstance(found, dict) or route.method != "POST":
        raise fault("invalid_params", "The body is a JSON object.", field="body")
    return found


def _from_text(param: Param, texts: list[str]) -> Any:
    kind = param.schema["type"]
    if kind == "array":
        return _checked(param.name, texts, param.schema)
    if len(texts) > 1:
        raise fault("invalid_params", f"{param.name} is there twice.", field=param.name)
    text = texts[0]
    if kind == "boolean":
        if text not in ("0", "1", "true", "false"):
            raise fault("invalid_params", f"{param.name} is 1 or 0.", field=param.name)
        return text in ("1", "true")
    if kind == "integer":
        if not (text.isascii() and text.isdigit()) or len(text) > 16:
            raise fault("invalid_params", f"{param.name} is a whole number.", field=param.name)
        return _checked(param.name, int(text), param.schema)
    return _checked(param.name, text, param.schema)


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
}


def _checked(name: str, value: Any, schema: Schema) -> Any:
    """The few kinds of schema that the table uses."""
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    fits = any(isinstance(value, _TYPES[kind]) and (kind == "boolean") == isinstance(value, bool) for kind in kinds)
    if not fits:
        raise fault("invalid_params", f"{name} is of type {' or '.join(kinds)}.", field=name)
    size = value if isinstance(value, int) else len(value)
    low = schema.get("minimum", schema.get("minLength", 0))
    high = schema.get("maximum", schema.get("maxLength", schema.get("maxItems", 2**53)))
    if not low <= size <= high:
        raise fault("invalid_params", f"{name} is between {low} and {high}, in size or number.", field=name)
    if "enum" in schema and value not in schema["enum"]:
        raise fault("invalid_params", f"{name} is one of {', '.join(schema['enum'])}.", field=name)
    if isinstance(value, str) and not _is_plain(value):
        raise fault("invalid_params", f"{name} holds NUL or half a character.", field=name)
    for part in value if isinstance(value, list) else ():
        _checked(name, part, schema["items"])
    for key, part in value.items() if isinstance(value, dict) else ():
        _checked(key, part, schema["additionalProperties"])
    return value


def _is_plain(text: str) -> bool:
    return "\0" not in text and not any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)


# The document.


def openapi(version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.whole_path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Mulligan", "version": version, "description": "What agents did to files, and undoing it."},
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(route: Route) -> dict[str, Any]:
    named = [param for param in route.params if param.where != "body"]
    body = [param for param in route.params if param.where == "body"]
    answers = {**({503: "Error"} if route.role is None else _FAILED), **route.answers}
    found: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}_{route.path.strip('/').replace('/', '_').translate(_NO_BRACES)}",
        "parameters": [_parameter(param) for param in named],
        "responses": {str(status): _response(route, status, name) for status, name in sorted(answers.items())},
    }
    if route.role is None:
        found["security"] = []
    if route.path.endswith(("undo", "restore", "rollback", "redo", "rewind", "merge")):
        header = {"name": "If-Match", "in": "header", "required": False, "schema": {"type": "string"}}
        found["parameters"].append(header)
    if body:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {param.name: param.schema for param in body},
            "additionalProperties": False,
        }
        required = [param.name for param in body if param.required]
        if required:
            schema["required"] = required
        content = {"application/json": {"schema": schema}}
        found["requestBody"] = {"required": bool(required), "content": content}
    return found


_NO_BRACES = str.maketrans({"{": "", "}": "", ".": "_"})


def _parameter(param: Param) -> dict[str, Any]:
    schema = {**param.schema} if param.default is None else {**param.schema, "default": param.default}
    return {"name": param.name, "in": param.where, "required": param.required, "schema": schema}


def _response(route: Route, status: int, name: str | None) -> dict[str, Any]:
    if name is None:
        return {"description": route.summary, "content": {route.media: {"schema": {}}}}
    schema = {"$ref": f"#/components/schemas/{name}"}
    words = route.summary if status < 400 else "Refused; the error says why."
    return {"description": words, "content": {"application/json": {"schema": schema}}}

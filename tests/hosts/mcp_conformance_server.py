"""A server for the official conformance suite: our real HTTP stack, and beside our tools the fixtures it asks for.

python -m tests.hosts.mcp_conformance_server ROOT STORE
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

import mulligan
from mulligan.servers.auth import StaticKeys
from mulligan.servers.mcp.dispatch import Toolbox
from mulligan.servers.mcp.http import AcceptedClients, make_app
from mulligan.servers.mcp.protocol import TOOLSETS, Body, Peer, Running, ToolTable, read_table
from mulligan.servers.own_host import Asgi, Receive, Scope, Send

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAD//w=="
TEXT = {"type": "text", "text": "This is a simple text response for testing."}
IMAGE = {"type": "image", "data": PNG, "mimeType": "image/png"}
RESOURCE = {
    "type": "resource",
    "resource": {"uri": "test://embedded-resource", "mimeType": "text/plain", "text": "This is an embedded resource."},
}

KEY = "key-of-the-conformance-suite"

ANSWERS: Mapping[str, list[Body]] = {
    "test_simple_text": [TEXT],
    "test_image_content": [IMAGE],
    "test_audio_content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
    "test_embedded_resource": [RESOURCE],
    "test_multiple_content_types": [{**TEXT, "text": "Multiple content types test:"}, IMAGE, RESOURCE],
    "test_error_handling": [{**TEXT, "text": "This tool intentionally returns an error for testing"}],
    "test_tool_with_progress": [TEXT],
    "test_custom_headers": [TEXT],
    "json_schema_2020_12_tool": [TEXT],
}

SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
HEADERS = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}


def fixture_tool(name: str) -> Body:
    schemas: Mapping[str, Body] = {"json_schema_2020_12_tool": SCHEMA_2020_12, "test_custom_headers": HEADERS}
    about = "A fixture of the conformance suite."
    given = schemas.get(name, {"type": "object", "properties": {}})
    return {"name": name, "title": f"fixture.{name}", "description": about, "inputSchema": given}


class FixtureToolbox:
    """Our toolbox, and before it the tools whose answers are fixed."""

    def __init__(self, ours: Toolbox) -> None:
        self._ours = ours

    def call(self, name: str, arguments: object, meta: Mapping[str, Any], *, peer: Peer, running: Running) -> Body:
        if name not in ANSWERS:
            return self._ours.call(name, arguments, meta, peer=peer, running=running)
        if name == "test_tool_with_progress" and running.progress is not None:
            for done in (0.0, 50.0, 100.0):
                running.progress(done, "working")
        return {"content": ANSWERS[name], "isError": name == "test_error_handling"}


def with_key(app: Asgi) -> Asgi:
    """The suite sends no token, so this sends one for it."""

    async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
        header = (b"authorization", f"Bearer {KEY}".encode())
        await app({**scope, "headers": [*scope.get("headers", ()), header]}, receive, send)

    return keyed


def main() -> None:
    root, store = sys.argv[1:]
    table = read_table()
    extended = ToolTable(
        table.server, {**table.tools, "history": table.tools["history"] + [*map(fixture_tool, ANSWERS)]}
    )
    with mulligan.open(root, store=store) as opened:
        toolbox = Toolbox(opened.open_root, opened.boundary)
        clients = AcceptedClients(StaticKeys([KEY]), opened.tokens)
        app = with_key(make_app(FixtureToolbox(toolbox), TOOLSETS, clients=clients, table=extended))
        uvicorn.run(app, host="127.0.0.1", port=0, access_log=False)


if __name__ == "__main__":
    main()

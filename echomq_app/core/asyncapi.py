"""The websocket protocol as an AsyncAPI 3.0 document, made of the frames' structs.

python -m echomq_app.core.asyncapi > docs/asyncapi.json
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

import msgspec

from . import frames

ADDRESS = "/ws/echomq/"


def document() -> dict[str, Any]:
    """Return the document; what a client sends and what it receives, frame by frame."""
    client, server = get_args(frames.ClientFrame), get_args(frames.ServerFrame)
    _, schemas = msgspec.json.schema_components(
        [*client, *server, frames.WireRecord], ref_template="#/components/schemas/{name}"
    )
    # On the wire these are any JSON: they are passed on as they are.
    schemas["Records"]["properties"]["records"] = {
        "type": "array",
        "items": {"$ref": "#/components/schemas/WireRecord"},
    }
    schemas["WireRecord"]["properties"] |= {"data": {}, "headers": {"type": "object"}}
    names = [kind.__name__ for kind in (*client, *server)]
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "EchoMQ live pages",
            "version": frames.SUBPROTOCOL,
            "description": "One websocket, many subscriptions to streams and events. A message "
            "is one frame, or an array of frames. See protocol.md.",
            "license": {"name": "MIT"},
        },
        "defaultContentType": "application/json",
        "channels": {
            "echomq": {
                "address": ADDRESS,
                "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in names},
            }
        },
        "operations": {
            "fromClient": _operation("receive", client),
            "fromServer": _operation("send", server),
        },
        "components": {"messages": {name: _message(name) for name in names}, "schemas": schemas},
    }


def _operation(action: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    return {
        "action": action,
        "channel": {"$ref": "#/channels/echomq"},
        "messages": [{"$ref": f"#/channels/echomq/messages/{kind.__name__}"} for kind in kinds],
    }


def _message(name: str) -> dict[str, Any]:
    kind = getattr(frames, name)
    return {
        "name": kind.__struct_config__.tag,
        "summary": (kind.__doc__ or "").strip(),
        "payload": {"$ref": f"#/components/schemas/{name}"},
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=2)
    sys.stdout.write("\n")

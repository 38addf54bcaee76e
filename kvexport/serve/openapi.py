"""The route /openapi.json: a description of all routes and of the JSON bodies that they take, in OpenAPI's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from kvexport.version import __version__


def describe(
    routes: Iterable[tuple[str, str, Callable[..., Any]]], bodies: Mapping[str, type[BaseModel]]
) -> dict[str, Any]:
    """Return the OpenAPI document. A route's summary is what its handler's docstring says after the first colon."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, path, handler in routes:
        path = path.replace(":path}", "}")
        operation: dict[str, Any] = {
            "summary": (handler.__doc__ or "").partition(": ")[2].partition("\n")[0],
            "responses": {"200": {"description": "the answer"}, "4XX": {"description": "an error of the request"}},
        }
        if names := re.findall(r"{(\w+)}", path):
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if method == "POST" and path in bodies:
            kind = bodies[path]
            schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[kind.__name__] = schema
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = operation
    info = {"title": "kvexport serve", "version": __version__}
    security = {"key": {"type": "http", "scheme": "bearer"}}
    components = {"schemas": schemas, "securitySchemes": security}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}

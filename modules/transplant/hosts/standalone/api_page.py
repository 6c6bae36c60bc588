"""The API's description for people: one page of HTML, without anyone else's scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any


def api_page(schema: Mapping[str, Any]) -> str:
    """The API for people to read: every route with what it takes."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<title>Transplant API</title><style>:root{color-scheme:light dark;font:15px/1.5 system-ui}"
        "body{max-width:52rem;margin:2rem auto;padding:0 1rem}code{font:14px ui-monospace,monospace}"
        "td,th{text-align:left;padding:.1rem .8rem .1rem 0;vertical-align:top}</style>"
        "<h1>Transplant API</h1><p>For programs: <a href=/openapi.json>openapi.json</a>.</p>"
    ]
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(route['summary'])}.</p>")
            rows = [*_query_rows(route), *_body_rows(route, schema)]
            if rows:
                parts.append(f"<table><tr><th>name<th>type<th>default<th>{''.join(rows)}</table>")
    return "".join(parts)


def _query_rows(route: Mapping[str, Any]) -> list[str]:
    return [_api_row(field["name"], field["schema"]) for field in route.get("parameters", ())]


def _body_rows(route: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = content.get("schema", {}).get("$ref", "").rpartition("/")[2]
    fields = schema["components"]["schemas"][name].get("properties", {}) if name else {}
    return [_api_row(key, field) for key, field in fields.items()]


def _api_row(name: str, field: Mapping[str, Any]) -> str:
    kinds = [part["type"] for part in field.get("anyOf", (field,)) if "type" in part]
    default = json.dumps(field["default"]) if "default" in field else ""
    cells = (f"<code>{escape(name)}", escape(" or ".join(kinds)), f"<code>{escape(default)}")
    return f"<tr><td>{'<td>'.join(cells)}<td>{escape(field.get('description', ''))}"

"""The response that says what was wrong with a request, in the form of the API that its route belongs to."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from .fields import ApiError

ANTHROPIC, OLLAMA = "/v1/messages", "/api/"  # routes whose errors have a form of their own
ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def error_response(error: ApiError, path: str) -> JSONResponse:
    if path.startswith(OLLAMA):
        return JSONResponse({"error": error.message}, error.status)
    form = anthropic_json if path.startswith(ANTHROPIC) else openai_json
    return JSONResponse(form(error), error.status)


def openai_json(error: ApiError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def anthropic_json(error: ApiError) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}

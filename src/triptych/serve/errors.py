"""The response that says what was wrong with a request."""

from __future__ import annotations

from starlette.responses import JSONResponse

from . import messages, ollama
from .fields import ApiError


def error_response(error: ApiError, path: str) -> JSONResponse:
    """An error in the form of the API that the route belongs to."""
    if path.startswith(messages.PATH):
        return JSONResponse(messages.error_json(error), error.status)
    if path.startswith(ollama.PREFIX):
        return JSONResponse({"error": error.message}, error.status)
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    details = {"message": error.message, "type": kind, "param": error.field, "code": error.code}
    return JSONResponse({"error": details}, error.status)

"""The routes /v1/sessions/NAME: download, upload and deletion of a session, a conversation's stored state."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvexport.errors import EnvironmentProblem, SnapshotError
from kvexport.serve.bodies import read_bytes
from kvexport.serve.errors import ApiError, overloaded
from kvexport.serve.service import Service
from kvexport.serve.sessions import check_session_name


async def get_session(service: Service, request: Request) -> Response:
    name = _path_name(request)
    snapshot = await service.sessions.get(name)
    if snapshot is None:
        raise _none(name)
    return Response(await service.beside(snapshot.to_bytes), media_type="application/octet-stream")


async def put_session(service: Service, request: Request) -> Response:
    name = _path_name(request)
    data = await read_bytes(request, service.session_bytes)
    try:
        await service.sessions.take(name, data)
    except SnapshotError as error:
        raise ApiError(400, error.problem, code="invalid_session") from error
    except EnvironmentProblem as error:
        raise ApiError(507, error.problem, code="session_not_kept") from error
    return JSONResponse({"id": name, "object": "session"})


async def delete_session(service: Service, request: Request) -> Response:
    name = _path_name(request)
    try:
        known = await service.sessions.delete(name)
    except EnvironmentProblem as error:
        raise overloaded(error.problem, 5) from error
    if not known:
        raise _none(name)
    return JSONResponse({"id": name, "object": "session", "deleted": True})


def _path_name(request: Request) -> str:
    name: str = request.path_params["name"]
    check_session_name(name)
    return name


def _none(name: str) -> ApiError:
    return ApiError(404, f"there is no session {name}, or no longer", code="session_not_found")

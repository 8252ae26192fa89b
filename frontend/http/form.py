"""Reads multipart forms that have one file."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from octavo.frontend.http.request import ApiRequest
from octavo.protocol.errors import InvalidRequestError


@asynccontextmanager
async def form_with_file(request: ApiRequest, max_fields: int) -> AsyncIterator[tuple[FormData, UploadFile]]:
    """Read a form. Its file is deleted when the context ends.

    Raises:
        InvalidRequestError: the body is not a form, or has no file.
    """
    try:
        async with request.form(max_files=1, max_fields=max_fields) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidRequestError("file is missing: send a multipart form with a file", "file")
            yield form, file
    except (MultiPartException, HTTPException) as error:
        detail = error.message if isinstance(error, MultiPartException) else error.detail
        raise InvalidRequestError(f"the body is no valid multipart form: {detail}", "file") from None

"""`AdapterRegistry`: the LoRA adapters of a client, by name, shared by all HTTP processes of a server."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.frontend.lora.reader import read_adapter
from octavo.frontend.lora.request import LoRARequest
from octavo.frontend.model_files.locate import locate_adapter
from octavo.protocol.adapters import Adapter
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError, ModelNotFoundError

FILE_NAME = "adapters"
"""File in the directory that the HTTP processes of a server share."""

MAX_NAME_LENGTH = 256
MAX_BY_ID = 4096
"""Maximum number of adapters of the Python API that are remembered; the files of older ones are read again."""


class NamedAdapter(msgspec.Struct, frozen=True):
    """An adapter that requests choose by name."""

    adapter: Adapter
    parent: str | None = None
    """Name of the adapter's base model. `None`: the served model."""


class AdapterRegistry:
    """Reads adapters and remembers them.

    Args:
        config: returns the engine's current configuration.
        run_in_thread: runs blocking work.
    """

    def __init__(
        self, config: Callable[[], ResolvedConfig], run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self.resolver_dir: Path | None = None
        """Directory whose adapters are loaded when a request names them. `None` if there is no such directory."""
        self.is_taken: Callable[[str], bool] = lambda name: False
        """Returns whether a name is used by another model of the server."""
        self._config = config
        self._run_in_thread = run_in_thread
        self._named: dict[str, NamedAdapter] = {}
        self._by_id: dict[int, tuple[str, str, Adapter]] = {}
        """Name, path and content of the adapter of each `lora_int_id`."""
        self._of_media: dict[str, Adapter] = {}
        """The model's own adapters, by the kind of media that they are for."""
        self._lock = asyncio.Lock()
        """Held while files are read, so that concurrent requests for a new adapter read it once."""
        self._path: Path | None = None
        self._stamp: object = None

    @property
    def named(self) -> dict[str, NamedAdapter]:
        """All adapters by name, including those that other processes have loaded."""
        if self._path is not None and self._stamp != (stamp := _stamp_of(self._path)):
            self._named = _read(self._path)
            self._stamp = stamp
        return self._named

    def share(self, path: Path) -> None:
        """Share the names, from now on, with the other processes that use this file."""
        self._path = path

    async def load(self, name: str, path: str, parent: str | None = None, *, replaces: bool = False) -> None:
        """Read an adapter, and make it available to requests.

        Args:
            name: for requests.
            path: path of its directory, or its hub id (`locate_adapter`).
            parent: name of its base model, for `/v1/models`. `None`: the served model.
            replaces: whether to replace an adapter of the same name; requests in flight keep the old adapter.

        Raises:
            InvalidRequestError: the name is in use or invalid, or the adapter does not fit.
        """
        self._check_name(name)
        path = await self._locate(path)
        async with self._lock:
            if name in self.named and not replaces:
                raise InvalidRequestError(
                    f"the adapter {name!r} is already loaded: use load_inplace to replace it", "lora_name"
                )
            adapter = await self._read(name, path)
            with self._changed() as named:
                named[name] = NamedAdapter(adapter, parent)

    def unload(self, name: str) -> None:
        """Remove a name. Requests in flight keep the adapter.

        Raises:
            ModelNotFoundError: there is no such adapter.
        """
        with self._changed() as named:
            if named.pop(name, None) is None:
                loaded = "GET /v1/models lists those that are loaded" if named else "none is loaded"
                raise ModelNotFoundError(f"there is no adapter {name!r}: {loaded}")

    async def find(self, name: str) -> NamedAdapter | None:
        """Return the adapter with a name, loading it from the resolver's directory if needed. `None` if not found.

        Raises:
            InvalidRequestError: the directory has it, but it cannot be used.
        """
        if (found := self.named.get(name)) is not None or self.resolver_dir is None:
            return found
        if (path := _resolved(self.resolver_dir, name)) is None:
            return None
        await self._load_once(name, path)
        return self.named.get(name)

    async def of_request(self, request: LoRARequest) -> Adapter:
        """Return the adapter of a request of the Python API; its files are read once.

        Raises:
            InvalidRequestError: it does not fit, or another adapter has its id.
        """
        if not isinstance(request, LoRARequest):
            raise InvalidRequestError(f"lora_request must be a LoRARequest, got {request!r}", "lora_request")
        if (known := self._known(request)) is not None:
            return known
        path = await self._locate(request.lora_path)
        async with self._lock:
            if (known := self._known(request)) is not None:  # another request has read it meanwhile
                return known
            adapter = await self._read(request.lora_name, path)
            if len(self._by_id) >= MAX_BY_ID:
                del self._by_id[next(iter(self._by_id))]
            self._by_id[request.lora_int_id] = request.lora_name, request.lora_path, adapter
            return adapter

    @property
    def ids(self) -> set[int]:
        """The `lora_int_id` of each adapter that `of_request` remembers."""
        return set(self._by_id)

    def forget(self, lora_int_id: int) -> bool:
        """Forget the adapter of an id, and return whether it was known. Requests in flight keep it."""
        return self._by_id.pop(lora_int_id, None) is not None

    async def of_media(self, kinds: Collection[str]) -> Adapter | None:
        """Return the model's own adapter for a prompt whose request names none; its files are read once.

        Args:
            kinds: kinds of media in the prompt.

        Raises:
            InvalidRequestError: it does not fit.
        """
        media = self._config().model.media
        own = media.adapters if media is not None else {}
        if (kind := next((one for one in own if one in kinds), None)) is None:
            return None
        async with self._lock:
            if kind not in self._of_media:
                self._of_media[kind] = await self._read(Path(own[kind]).name, own[kind])
            return self._of_media[kind]

    def _known(self, request: LoRARequest) -> Adapter | None:
        """Return the adapter that an id stands for. `None` if its files must be read.

        Raises:
            InvalidRequestError: another adapter has the id.
        """
        if request.load_inplace or (known := self._by_id.get(request.lora_int_id)) is None:
            return None
        name, path, adapter = known
        if (name, path) == (request.lora_name, request.lora_path):
            return adapter
        raise InvalidRequestError(
            f"lora_int_id {request.lora_int_id} is that of the adapter {name!r} in {path}: use another, or "
            "load_inplace to replace it",
            "lora_int_id",
        )

    async def _locate(self, path: str) -> str:
        """Return the directory of an adapter. Called without the lock, because downloads are slow."""
        locate = partial(locate_adapter, path, self._config().download_dir, Env.read())
        try:
            return str(await self._run_in_thread(locate))
        except ConfigError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise InvalidRequestError(f"{error.message}{hint}", "lora_path") from error

    async def _load_once(self, name: str, path: Path) -> None:
        async with self._lock:
            if name in self.named:
                return
            adapter = await self._read(name, str(path))
            with self._changed() as named:
                named.setdefault(name, NamedAdapter(adapter))

    async def _read(self, name: str, path: str) -> Adapter:
        adapter: Adapter = await self._run_in_thread(partial(read_adapter, name, path, self._config()))
        return adapter

    def _check_name(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise InvalidRequestError(f"lora_name must be 1 to {MAX_NAME_LENGTH} printable characters", "lora_name")
        if name in self._config().served_model_names:
            raise InvalidRequestError(f"lora_name {name!r} is a name of the model itself", "lora_name")
        if self.is_taken(name):
            raise InvalidRequestError(f"lora_name {name!r} is a name of another model of this server", "lora_name")

    @contextlib.contextmanager
    def _changed(self) -> Iterator[dict[str, NamedAdapter]]:
        """Yield the names for a change, and write them; other processes are locked out meanwhile."""
        if self._path is None:
            yield self._named
            return
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            named = _read(self._path)
            yield named
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(named))
            os.replace(new, self._path)


def _resolved(directory: Path, name: str) -> Path | None:
    """Return the directory of the adapter with a name; never one outside of `directory`. `None` if there is none."""
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        return None
    path = directory.joinpath(*parts)
    return path if (path / "adapter_config.json").is_file() else None


def _stamp_of(path: Path) -> object:
    """Return a value that changes whenever the file is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _read(path: Path) -> dict[str, NamedAdapter]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, NamedAdapter])
    except FileNotFoundError:
        return {}

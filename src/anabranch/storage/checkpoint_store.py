"""Where checkpoint files are: below the checkpoint directory, or at a URL that fsspec knows.

A cut names its files either by a path relative to the directory or by a whole URL, so reading needs
no setting, and a job may write to another place than the run before it. A file counts once a cut
names it, which is after it was written: a store needs neither rename nor locks for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa

from anabranch.errors import AnabranchError, ConfigError, StorageError
from anabranch.storage.credentials import masked, refuse_credentials
from anabranch.storage.store import Store

LOCAL = "checkpoints"  # below the checkpoint directory
# What reading a file raises because of what is in it.
DAMAGE = (ValueError, KeyError, TypeError, pa.ArrowException)


@contextlib.contextmanager
def opened(store: Store, name: str) -> Iterator[BinaryIO]:
    """A file to be read."""
    if not is_url(name):
        with store.opened(name) as file:
            yield file
        return
    with _explained("read", name):
        system, path = _located(name)
        file = system.open(path, "rb")
    with _explained("read", name, passing=DAMAGE), file:
        yield file


def write(store: Store, name: str, parts: Iterable[Any]) -> int:
    """Write `parts` as one file that survives a crash; its size."""
    if not is_url(name):
        return store.put(name, parts, unhurried=True)
    size = 0
    with _explained("write", name):
        system, path = _located(name)
        with contextlib.suppress(NotImplementedError):  # an object store has no directories
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with system.open(path, "wb") as file:
            for part in parts:
                file.write(memoryview(part))
                size += memoryview(part).nbytes
    return size


def names(store: Store, place: str) -> list[str]:
    """All checkpoint files at a place, LOCAL or a URL, also those that nobody finished."""
    if not is_url(place):
        chains = [f"{place}/{c}" for c in store.names(place)]
        partitions = [f"{c}/{i}" for c in chains for i in store.names(c)]
        return [f"{p}/{file}" for p in partitions for file in store.names(p) if ".ckpt" in file]
    with _explained("list", place):
        system, base = _located(place)
        found = system.glob(f"{base.rstrip('/')}/*/*/*.ckpt")
        return [f"{place}/{'/'.join(path.split('/')[-3:])}" for path in found]


def delete(store: Store, name: str) -> None:
    if not is_url(name):
        store.delete(name)
        return
    with _explained("delete", name):
        system, path = _located(name)
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(path)


def is_there(store: Store, name: str) -> bool:
    """Whether there is such a file; what is at a URL is found out when it is read."""
    return is_url(name) or store.has(name)


def is_url(name: str) -> bool:
    return "://" in name


def check_url(url: str) -> str:
    """The URL as files below it are named; refused if nobody can write there."""
    refuse_credentials(
        url, "state_url", "give it to the store's own settings (its environment or configuration)"
    )
    if not is_url(url):
        raise ConfigError(
            f"state_url is {masked(url)!r}; give a URL such as s3://bucket/job, or leave it out to "
            "keep state in the checkpoint directory"
        )
    try:
        _located(url)
    except (ImportError, ValueError) as e:
        raise ConfigError(
            f"state_url is {masked(url)!r}: {e}; install fsspec and the package for this kind of "
            "URL, here and on every executor"
        ) from e
    return url.rstrip("/")


def _located(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path)


@contextlib.contextmanager
def _explained(action: str, url: str, passing: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Every store raises errors of its own. A URL of the version before may hold a password, and
    then so may they."""
    shown = masked(url)
    try:
        yield
    except AnabranchError:
        raise
    except passing:
        raise
    except Exception as e:
        raise StorageError(
            f"cannot {action} {shown}: {e!r}; check the store".replace(url, shown), path=shown
        ) from (e if shown == url else None)

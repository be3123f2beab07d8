"""How a running job is asked for its status and for changes, by other processes of this machine.

A Unix socket in the kernel's own namespace: it ends with the driver, and no file is left. Where it
is and its key are in a file of the checkpoint directory that only its owner may read; whoever does
not know the key is turned away before anything is read. Requests and answers are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any, Protocol

from anabranch.errors import AdjustmentError, AnabranchError
from anabranch.storage.files import explained

ENDPOINT = "control.json"
ANSWER_S = 120.0  # a request waits for the slice, or the recovery, in hand
MAX_REQUEST_BYTES = 65_536
RETRY_S = 0.5

Answer = dict[str, Any]


class Controlled(Protocol):
    """A job that can be asked."""

    def status(self) -> Answer: ...

    def scale(self, operator: str, parallelism: int) -> None: ...

    def add_nodes(self, count: int) -> None: ...

    def drain(self, node: str) -> None: ...


class Endpoint:
    """Answers until it is closed; every caller has a thread of its own."""

    def __init__(self, root: Path, job: Controlled) -> None:
        self._job = job
        self._path = root / ENDPOINT
        self._key = secrets.token_bytes(32)
        self._name = f"anabranch-{secrets.token_hex(8)}"
        self._closed = False
        self._listener = Listener(f"\0{self._name}", family="AF_UNIX")
        where = {"socket": self._name, "key": self._key.hex(), "host": socket.gethostname()}
        _write_private(self._path, json.dumps(where))
        threading.Thread(target=self._listen, name="anabranch-control", daemon=True).start()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):  # wake the listener
            Client(f"\0{self._name}", family="AF_UNIX").close()
        self._path.unlink(missing_ok=True)

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    caller = self._listener.accept()
                except OSError:  # too many open files, say
                    time.sleep(RETRY_S)
                    continue
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: Connection) -> None:
        with caller, contextlib.suppress(OSError, EOFError, AuthenticationError):
            deliver_challenge(caller, self._key)
            answer_challenge(caller, self._key)
            request = caller.recv_bytes(MAX_REQUEST_BYTES)
            caller.send_bytes(json.dumps(self._answer(request)).encode())

    def _answer(self, request: bytes) -> Answer:
        try:
            return {"answer": self._do(json.loads(request))}
        except ValueError:
            return {"refused": "the request is not JSON"}
        except AnabranchError as e:
            return {"refused": e.message}

    def _do(self, request: Any) -> Answer:
        match request:
            case {"do": "status"}:
                return self._job.status()
            case {"do": "scale", "operator": str(operator), "parallelism": int(parallelism)}:
                self._job.scale(operator, parallelism)
            case {"do": "add_nodes", "count": int(count)}:
                self._job.add_nodes(count)
            case {"do": "drain", "node": str(node)}:
                self._job.drain(node)
            case _:
                raise AdjustmentError(
                    f"the job does not understand {request!r}; use the Anabranch it runs with"
                )
        return {}


def ask(directory: Path, request: Mapping[str, Any]) -> Answer:
    """The answer of the job that runs on a checkpoint directory; AdjustmentError if it refuses."""
    path = directory / ENDPOINT
    if not path.is_file():
        raise AdjustmentError(
            f"no job is running on {directory}; give the checkpoint directory of one that is"
        )
    with explained("read", path):
        text = path.read_text()
    try:
        where = json.loads(text)
        name, key, host = where["socket"], bytes.fromhex(where["key"]), where["host"]
    except (ValueError, KeyError, TypeError):
        raise AdjustmentError(f"{path} is damaged; start the job again to have it anew") from None
    try:
        with Client(f"\0{name}", family="AF_UNIX", authkey=key) as job:
            job.send_bytes(json.dumps(request).encode())
            if not job.poll(ANSWER_S):
                raise AdjustmentError(f"the job on {directory} gave no answer in {ANSWER_S:.0f} s")
            found = json.loads(job.recv_bytes())
    except AuthenticationError:
        raise AdjustmentError(
            f"the job on {directory} does not accept the key in {path}; the file was changed, or "
            "belongs to another job"
        ) from None
    except (OSError, EOFError):
        raise AdjustmentError(
            f"no job is running on {directory} any more; the last one ran on {host} and did not "
            "end by itself, so start it again"
        ) from None
    if "refused" in found:
        raise AdjustmentError(found["refused"])
    answer: Answer = found["answer"]
    return answer


def _write_private(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained("write", path):
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        temporary.replace(path)

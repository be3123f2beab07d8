"""How a running job is asked for its status and for changes, by other processes of this machine.

A Unix socket in the kernel's own namespace: it ends with the driver, and no file is left. Everybody
on the machine can connect to it, so callers of another user, root aside, are turned away at once
and hold nothing. Where it is and its key are in a file of the checkpoint directory that only its
owner may read; a caller that does not show the key in time is turned away before anything is read.
Requests and answers are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Protocol

from anabranch.driver.status import JobStatus
from anabranch.errors import AdjustmentError, AnabranchError
from anabranch.node.process.wire import peer_user
from anabranch.storage.files import directory as named
from anabranch.storage.files import explained
from anabranch.storage.versions import format_of, other_format

ENDPOINT = "control.json"
FORMAT = 1
ANSWER_S = 120.0  # a request waits for the slice, or the recovery, in hand
MAX_REQUEST_BYTES = 65_536
RETRY_S = 0.5
MAX_CALLERS = 16  # at a time, each with a thread; others wait until they are let in
GREET_S = 5.0  # to show that one knows the key, and to say what one wants
ROOT = 0

Answer = dict[str, Any]


class Controlled(Protocol):
    """A job that can be asked."""

    def status(self) -> JobStatus: ...

    def scale(self, operator: str, parallelism: int) -> None: ...

    def add_nodes(self, count: int) -> None: ...

    def drain(self, node: str) -> None: ...


class Endpoint:
    """Answers until it is closed; every caller that is let in has a thread of its own."""

    def __init__(self, root: Path, job: Controlled) -> None:
        self._job = job
        self._path = root / ENDPOINT
        self._key = secrets.token_bytes(32)
        self._name = f"anabranch-{secrets.token_hex(8)}"
        self._closed = False
        self._places = threading.Semaphore(MAX_CALLERS)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(MAX_CALLERS)
        where = {
            "format": FORMAT,
            "socket": self._name,
            "key": self._key.hex(),
            "host": socket.gethostname(),
        }
        _write_private(self._path, json.dumps(where))
        threading.Thread(target=self._listen, name="anabranch-control", daemon=True).start()

    def answers_for(self, job: Controlled) -> None:
        """Requests from now on are this job's."""
        self._job = job

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        with contextlib.suppress(OSError):
            if self._name in self._path.read_text():  # not that of a driver that has taken over
                self._path.unlink()

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    caller, _ = self._listener.accept()
                except OSError:  # too many open files, say
                    if not self._closed:
                        time.sleep(RETRY_S)
                    continue
                if peer_user(caller) not in (os.geteuid(), ROOT):
                    caller.close()
                    continue
                self._places.acquire()  # only for those of the same user, who must let go in time
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        try:
            _limit(caller, GREET_S)
            with Connection(caller.detach()) as job, contextlib.suppress(*_GONE):
                deliver_challenge(job, self._key)
                answer_challenge(job, self._key)
                request = job.recv_bytes(MAX_REQUEST_BYTES)
                job.send_bytes(json.dumps(self._answer(request)).encode())
        finally:
            self._places.release()

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
                return asdict(self._job.status())
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
    path = named(directory, "the checkpoint directory") / ENDPOINT
    if not path.is_file():
        raise AdjustmentError(
            f"no job is running on {directory}; give the checkpoint directory of one that is"
        )
    with explained("read", path), path.open() as file:
        text, owner = file.read(), os.fstat(file.fileno()).st_uid
    try:
        where = json.loads(text)
        if (found := format_of(where)) != FORMAT:
            raise AdjustmentError(f"{path} {other_format(found, FORMAT, use='ask the job with')}")
        name, key, host = where["socket"], bytes.fromhex(where["key"]), where["host"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise AdjustmentError(f"{path} is damaged; start the job again to have it anew") from None
    try:
        with _call(name, owner) as job:
            answer_challenge(job, key)
            deliver_challenge(job, key)
            job.send_bytes(json.dumps(request).encode())
            found = json.loads(job.recv_bytes())
    except AuthenticationError:
        raise AdjustmentError(
            f"the job on {directory} does not accept the key in {path}; the file was changed, or "
            "belongs to another job"
        ) from None
    except BlockingIOError:
        raise AdjustmentError(
            f"the job on {directory} gave no answer in {ANSWER_S:.0f} s"
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


_GONE = (OSError, EOFError, AuthenticationError)


def _call(name: str, owner: int) -> Connection:
    """To the job of the file's owner: somebody else may have taken the name when it ended."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _limit(sock, ANSWER_S)
        sock.connect(f"\0{name}")
        if peer_user(sock) != owner:
            raise ConnectionRefusedError
    except BaseException:
        sock.close()
        raise
    return Connection(sock.detach())


def _limit(sock: socket.socket, seconds: float) -> None:
    """Whatever is waited for takes no longer; BlockingIOError if it would."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def _write_private(path: Path, text: str) -> None:
    """A file that only its owner may read, from its first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained("write", path):
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(text)
        temporary.replace(path)

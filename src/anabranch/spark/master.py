"""Is there a Spark master where the user says? Asked before a JVM is started for it.

Spark itself tries for a minute and then prints the traces of three threads. What is refused here is
what cannot work: a URL that is none, a host or a port that does not answer, a port of something
else. A Spark server answers a request for a stream it does not have; the stream's name makes every
server of HTTP answer, too. Needs no pyspark.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct

from anabranch.errors import ClusterError, ConfigError
from anabranch.spark.settings import refuse_local

CONNECT_S = 3.0
ANSWER_S = 10.0  # a master on a busy machine took five for its first answer
_STREAM_REQUEST, _STREAM_FAILURE = 6, 8  # types of messages in Spark's network protocol
_NAME = b"/files/anabranch\r\n\r\n"  # below /files, so that no master logs an error for it
_FORMS = "spark://host:7077, yarn, k8s://https://host:6443 or local-cluster[n,1,1024]"


def check_master(master: str) -> None:
    """Refuse, in a sentence and soon, a master on which no session can be."""
    refuse_local(master)
    if master == "yarn" or re.fullmatch(r"k8s://\S+", master):
        return
    if master.startswith("local-cluster"):
        if not re.fullmatch(r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]", master):
            raise ConfigError(f"master is {master!r}; write local-cluster[nodes,1,megabytes]")
        return
    addresses = master.removeprefix("spark://").split(",")
    parsed = [
        re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([^\s:/@\[\]]+)):(\d{1,5})", a) for a in addresses
    ]
    if not master.startswith("spark://") or not all(parsed):
        raise ConfigError(f"master is {master!r}, which is no Spark master; give {_FORMS}")
    problems = []
    for found in parsed:
        assert found is not None
        problem = _problem(found[1] or found[2], int(found[3]))
        if problem is None:
            return
        problems.append(problem)
    raise ClusterError(
        f"no Spark master answers at {master}: {'; '.join(problems)}; check the address, or leave "
        "the master out to have a cluster on this machine",
        master=master,
    )


def _problem(host: str, port: int) -> str | None:
    """Why there is no Spark master; None where something speaks its protocol."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), CONNECT_S) as connection:
            answer = _asked(connection)
    except socket.gaierror:
        return f"there is no host {host}"
    except TimeoutError:
        return f"{where} did not answer in {CONNECT_S:.0f} s"
    except (OSError, OverflowError) as e:
        return f"{where}: {getattr(e, 'strerror', None) or e}"
    if len(answer) > 8 and answer[8] == _STREAM_FAILURE:
        return None
    if answer[:1].isalpha() or answer.startswith((b"<", b"+", b"-")):
        said = answer.decode("ascii", "replace").splitlines()[0][:60]
        return f"something else listens on {where}, it says {said!r}"
    if not answer:
        return f"something listens on {where} that does not answer as Spark does"
    return None  # encrypted, perhaps


def _asked(connection: socket.socket) -> bytes:
    body = struct.pack(">bi", _STREAM_REQUEST, len(_NAME)) + _NAME
    connection.settimeout(ANSWER_S)
    with contextlib.suppress(TimeoutError, ConnectionError):
        connection.sendall(struct.pack(">q", 8 + len(body)) + body)
        return connection.recv(4096)
    return b""

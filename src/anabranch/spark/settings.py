"""What a session is told before it starts: Anabranch's settings, the user's, and who wins.

What decides whether a job is right (`OWNED`) is Anabranch's alone: a user who gives it is refused
with a sentence, and a line of `spark-defaults.conf`, which is for all of a user's applications, is
passed over. Of everything else the user's word counts. Needs no pyspark.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.errors import ConfigError
from anabranch.storage.files import explained

SETTINGS: dict[str, str] = {
    # One task at a time per executor: a node is one executor and one node process.
    "spark.executor.cores": "1",
    "spark.task.cpus": "1",
    # A task is pinned by the preferred location executor_<host>_<id>; it waits for that executor
    # rather than run elsewhere. The driver cancels the job of a lost executor, so nothing waits
    # this long.
    "spark.locality.wait.process": "600s",
    # Coarser preferences (host, rack) are hints: never wait for them.
    "spark.locality.wait": "0s",
    # Else Spark moves reduce tasks to where most of their input lies, away from their node.
    "spark.shuffle.reduceLocality.enabled": "false",
    # How soon a task held back by locality is offered again (Spark: 1 s, longer than a wave).
    "spark.scheduler.revive.interval": "100ms",
    # A second copy of a pinned task would run on a node without its state.
    "spark.speculation": "false",
    # Spark would stop idle executors, and their state with them; Anabranch scales by itself.
    "spark.dynamicAllocation.enabled": "false",
    # Which node is unfit is decided by the control plane alone.
    "spark.excludeOnFailure.enabled": "false",
    # A fetch from a dead node must fail at once, not after three waits of 5 s.
    "spark.shuffle.io.retryWait": "200ms",
    # A new Python worker per task would cost its start and imports in every wave.
    "spark.python.worker.reuse": "true",
    # Between the JVM and Python workers, TCP with small writes stalls 40 ms on delayed
    # acknowledgements, several times per slice; Unix sockets do not (Spark 4.1 and newer).
    "spark.python.unix.domain.socket.enabled": "true",
    # Shuffle files of past waves are freed only after a driver garbage collection (Spark: 30 min).
    "spark.cleaner.periodicGC.interval": "5min",
    # Progress bars would overwrite the terminal several times a second.
    "spark.ui.showConsoleProgress": "false",
}

_PINNED = "tasks must stay on the node that holds their state"
_SLOT = "a node is one executor that runs one task at a time"
# Why, or what to give instead.
OWNED: dict[str, str] = {
    "spark.master": "give the master itself",
    "spark.executor.memory": "give memory (--memory) instead",
    "spark.executor.instances": "give nodes (--nodes) instead",
    "spark.cores.max": "give nodes (--nodes) instead",
    "spark.executor.cores": _SLOT,
    "spark.task.cpus": _SLOT,
    "spark.locality.wait": _PINNED,
    "spark.locality.wait.process": _PINNED,
    "spark.shuffle.reduceLocality.enabled": _PINNED,
    "spark.speculation": _PINNED,
    "spark.dynamicAllocation.enabled": "Spark would stop idle executors with their state",
    "spark.excludeOnFailure.enabled": "Spark would keep tasks from the only node with their state",
    "spark.python.worker.reuse": "a new Python worker per task would start in every wave",
}
# Of the cluster on this machine besides: who may talk to it, and where its files are.
EMBEDDED = (
    "spark.authenticate",
    "spark.authenticate.",
    "spark.deploy.",
    "spark.driver.bindAddress",
    "spark.driver.host",
    "spark.local.dir",
    "spark.master.",
    "spark.org.apache.spark.ui.JWSFilter.",
    "spark.python.daemon.module",
    "spark.python.unix.domain.socket.dir",
    "spark.ssl.",
    "spark.submit.deployMode",
    "spark.ui.filters",
    "spark.worker.",
)
MIN_MEMORY_MB = 512  # of an executor: Spark refuses less
PACKAGES = "spark.jars.packages"


def refuse_local(master: str) -> None:
    if re.match(r"local(\[|$)", master):
        raise ConfigError(
            f"master {master} has no executors that could fail or be added: leave it out to have a "
            "cluster on this machine (EmbeddedCluster), or give local-cluster[n,1,1024]",
            master=master,
        )


def require_pyspark() -> None:
    if importlib.util.find_spec("pyspark") is None:
        raise ConfigError(
            "Anabranch runs on Spark, and this Python has no pyspark: pip install 'pyspark>=4.0,<5'"
        )


def checked_conf(
    conf: Mapping[str, object], packages: Sequence[str] | str, embedded: bool
) -> dict[str, str]:
    """The user's settings as Spark takes them; refused if one is not theirs to give."""
    found = {key: _text(key, value) for key, value in conf.items()}
    for key in found:
        if not key.startswith("spark.") or key.endswith("."):
            raise ConfigError(
                f"{key!r} is no setting of Spark; their names begin with spark. (give "
                "**{'spark.sql.shuffle.partitions': 8}, or --conf spark.sql.shuffle.partitions=8)"
            )
        if is_owned(key, embedded):
            why = OWNED.get(key, "the cluster of this machine decides it")
            raise ConfigError(f"{key} cannot be set: {why}", key=key)
    wanted = [packages] if isinstance(packages, str) else list(packages)
    for name in wanted:
        if not re.fullmatch(r"[^\s:,]+:[^\s:,]+:[^\s:,]+", name):
            raise ConfigError(
                f"the package {name!r} is not one of Maven; write group:artifact:version, such as "
                "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
            )
    if wanted:
        found[PACKAGES] = ",".join([*filter(None, [found.get(PACKAGES)]), *wanted])
    return found


def is_owned(key: str, embedded: bool) -> bool:
    """Is the setting Anabranch's to make? Names that end with a dot stand for all below them."""
    ours = (*OWNED, *(EMBEDDED if embedded else ()))
    return any(key == o or (o.endswith(".") and key.startswith(o)) for o in ours)


def pairs(given: Sequence[str]) -> dict[str, str]:
    """`key=value` as the command line has them."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not (equals and key.strip()):
            raise ConfigError(f"--conf is {text!r}; write key=value, such as spark.ui.port=4050")
        found[key.strip()] = value.strip()
    return found


def megabytes(memory: str) -> int:
    """`4g`, `1500m`: as Spark writes the memory of an executor."""
    found = re.fullmatch(r"\s*(\d+)\s*([mgt])i?b?\s*", str(memory), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"memory is {memory!r}; write a number and a unit, such as 4g or 1500m")
    size = int(found[1]) * {"m": 1, "g": 1024, "t": 1024 * 1024}[found[2].lower()]
    if size < MIN_MEMORY_MB:
        raise ConfigError(f"memory is {memory}; a Spark executor needs {MIN_MEMORY_MB}m or more")
    return size


def users_defaults(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the user's spark-defaults.conf says, where Spark would look for it."""
    environ = os.environ if environ is None else environ
    directory = environ.get("SPARK_CONF_DIR")
    if not directory and environ.get("SPARK_HOME"):
        directory = f"{environ['SPARK_HOME']}/conf"
    path = Path(directory or "") / "spark-defaults.conf"
    if not directory or not path.is_file():
        return {}
    with explained("read", path):
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = {}
    for line in lines:
        if line and line[0] not in "#!":
            key, *value = re.split(r"\s*[=:\s]\s*", line, maxsplit=1)
            found[key] = value[0] if value else ""
    return {k: v for k, v in found.items() if k.startswith("spark.")}


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ConfigError(f"{key} is {value!r}; give a string, a number or a boolean", key=key)

"""What Anabranch asks of a Spark session, and what it asks from it.

Decides whether a session can run a topology at all. The invariant it protects: a task pinned to
a node runs on that node or not at all, alone on it, and with the driver's Python and package.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from py_compile import PycInvalidationMode
from py_compile import compile as compile_module
from typing import Any
from weakref import WeakKeyDictionary

from py4j.java_gateway import JavaObject
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import SparkSession

import anabranch
from anabranch.errors import ClusterError, ConfigError
from anabranch.spark.settings import SETTINGS, refuse_local

MIN_SPARK = (4, 0)
SHARES_FILES = "spark.anabranch.sharesFiles"  # set by clusters on this machine
# A pinned task may wait for a node that is busy with a large slice.
MIN_PINNED_WAIT_MS = 60_000
# The versions named in pyproject.toml.
EXECUTOR_PACKAGES = {"pyarrow": (18,), "polars": (1, 20), "numpy": (1, 26)}


def check_session(spark: SparkSession) -> None:
    """Refuse, in one sentence, a session that no topology can run on. Runs no Spark job."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise ConfigError(
            "Anabranch pins tasks to executors, which Spark Connect cannot: build the session "
            "with SparkSession.builder.master(...) instead of .remote(...)"
        )
    if not isinstance(spark, SparkSession):
        raise ConfigError(
            f"spark is {spark!r}, which is no Spark session; give that of a cluster: "
            "EmbeddedCluster(nodes=3).session(name), or SparkSession.builder…getOrCreate()"
        )
    if _numbers(spark.version) < MIN_SPARK:
        least = ".".join(map(str, MIN_SPARK))
        raise ConfigError(f"Spark {spark.version} is too old: install pyspark>={least}")
    conf = spark.sparkContext.getConf()
    _check_slots(spark.sparkContext.master, conf)
    for key in (
        "spark.speculation",
        "spark.dynamicAllocation.enabled",
        "spark.excludeOnFailure.enabled",
    ):
        if conf.get(key, "false").lower() == "true":
            raise ConfigError(f"set {key}=false before the session starts: {_WHY[key]}", key=key)
    _check_locality(spark, conf)


_WHY = {
    "spark.speculation": "a copy of a pinned task would run on a node without its state",
    "spark.dynamicAllocation.enabled": "Spark would stop idle executors together with their state",
    "spark.excludeOnFailure.enabled": "Spark would keep tasks from the only node with their state",
}


def _check_slots(master: str, conf: Any) -> None:
    refuse_local(master)
    cores = conf.get("spark.executor.cores", None)
    if cores is None:
        local_cluster = re.match(r"local-cluster\[\s*\d+\s*,\s*(\d+)", master)
        if local_cluster:
            cores = local_cluster.group(1)
        elif master.startswith("spark://"):
            raise ConfigError(
                "set spark.executor.cores=1 before the session starts: without it an executor of "
                "a standalone cluster takes all cores of its worker",
                key="spark.executor.cores",
            )
        else:
            cores = "1"
    cpus = conf.get("spark.task.cpus", "1")
    if int(cores) // int(cpus) != 1:
        raise ConfigError(
            f"executors have {cores} cores and tasks take {cpus}, but a node runs one task at a "
            f"time: set spark.executor.cores=1, or spark.task.cpus={cores}",
            cores=cores,
            cpus=cpus,
        )


def _check_locality(spark: SparkSession, conf: Any) -> None:
    key = "spark.locality.wait.process"
    stated = conf.get(key, conf.get("spark.locality.wait", "3s"))
    as_ms = spark.sparkContext._jvm.org.apache.spark.network.util.JavaUtils.timeStringAsMs
    if as_ms(stated) < MIN_PINNED_WAIT_MS:
        raise ConfigError(
            f"set {key}={SETTINGS[key]} before the session starts (it is {stated}): tasks would "
            "leave the node that holds their state",
            key=key,
        )
    key = "spark.shuffle.reduceLocality.enabled"
    if conf.get(key, "true").lower() != "false":
        raise ConfigError(
            f"set {key}=false before the session starts: Spark would move reduce tasks away from "
            "the node that holds their state",
            key=key,
        )


def close_callbacks(spark: SparkSession) -> None:
    """Let nobody but Spark's own JVM call back into this process, as it does for every batch.

    PySpark listens for that on a port of this machine and serves every caller: any user of the
    machine could offer the job a batch. Py4J can ask for a token, but its JVM side forgets it
    where it learns the port (`PythonClient.copyWith`), so it is put there by hand.
    """
    context: Any = spark.sparkContext
    gateway = context._gateway
    ensure_callback_server_started(gateway)
    token = gateway.gateway_parameters.auth_token
    caller = JavaObject("GATEWAY_SERVER", gateway._gateway_client).getCallbackClient()
    field = context._jvm.java.lang.Class.forName("py4j.CallbackClient").getDeclaredField(
        "authToken"
    )
    field.setAccessible(True)
    field.set(caller, token)
    gateway.callback_server_parameters.auth_token = token


def executors(spark: SparkSession) -> dict[str, str]:
    """Executor id → host of all executors that can take a task now, in the order of their ids.

    Cheap enough to poll: the scheduler drops a killed executor with its connection. Hosts are
    remembered, since an id is never reused in an application and the map they come from may be
    read while it grows: a miss there delays a newcomer by one call, it never hides a live node.
    """
    context = spark.sparkContext
    hosts = _hosts.setdefault(context, {})
    listed = context._jsc.sc().getExecutorIds().mkString(",")
    ids = sorted((i for i in listed.split(",") if i), key=_numbers)
    if not hosts.keys() >= set(ids):
        entries = context._jsc.sc().taskScheduler().executorIdToHost().mkString(",")
        hosts.update(re.findall(r"([^,]+) -> ([^,]+)", entries))
    return {i: hosts[i] for i in ids if i in hosts}


_hosts: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()


def check_executors(spark: SparkSession) -> None:
    """Run one small Python task on every executor: same Python, all packages, new enough.

    A barrier stage starts all its tasks at once, so with one slot per executor each gets one.
    """
    count = len(executors(spark))
    if not count:
        raise ClusterError("the session has no executors yet: wait until its cluster offers some")
    needed = EXECUTOR_PACKAGES

    # A nested function travels by value: a node that lacks our package can still answer.
    def probe(_: Iterator[Any]) -> Iterator[tuple[str, str, str]]:
        import importlib
        import socket

        for package in needed:
            try:
                module = importlib.import_module(package)
                yield socket.gethostname(), package, str(module.__version__)
            except ImportError as error:
                yield socket.gethostname(), package, f"missing: {error}"

    tasks = spark.sparkContext.parallelize(range(count), count).barrier()
    try:
        answers = tasks.mapPartitions(probe).collect()
    except Exception as error:
        raise _explain(error) from None
    for host, package, answer in sorted(set(answers)):
        if answer.startswith("missing") or _numbers(answer) < needed[package]:
            least = ".".join(map(str, needed[package]))
            raise ClusterError(
                f"executors on {host} have {package} {answer}: install {package}>={least} there "
                "for the Python that PYSPARK_PYTHON names",
                host=host,
                package=package,
            )


def _explain(error: Exception) -> Exception:
    """The sentence for a failed probe; anything unknown keeps its first lines."""
    text = str(error)
    driver = f"{sys.version_info.major}.{sys.version_info.minor}"
    advice = f"set PYSPARK_PYTHON to a Python {driver} that exists on every executor"
    if "PYTHON_VERSION_MISMATCH" in text:
        found = re.search(r"different version[^:]*: (\d+\.\d+)", text)
        theirs = f"Python {found.group(1)}" if found else "another Python"
        return ConfigError(f"executors run {theirs} and the driver {driver}: {advice}")
    missing = re.search(r'Cannot run program "([^"]+)"', text)
    if missing:
        return ConfigError(f"executors have no Python at {missing.group(1)}: {advice}")
    return ClusterError(f"a Python task on the executors failed: {text[:500]}")


def ship_package(spark: SparkSession) -> str:
    """Make exactly the driver's anabranch importable on executors; returns the shipped file's name.

    Once per session: a second call finds the file and does nothing. Spark puts shipped files
    ahead of installed packages on the executors' path.
    """
    name = f"anabranch-{anabranch.__version__}.zip"
    context = spark.sparkContext
    if not any(url.endswith("/" + name) for url in context.listFiles):
        # Executors fetch the file from here whenever they join; Spark removes it with the session.
        target = Path(context._temp_dir) / name
        _zip_package(target)
        context.addPyFile(str(target))
    return name


def shares_files(spark: SparkSession) -> bool:
    """Do executors run this very Python with its packages? Then nothing need be shipped to them,
    nor looked for."""
    return bool(spark.sparkContext.getConf().get(SHARES_FILES, "false") == "true")


def _zip_package(target: Path) -> None:
    """Sources with their bytecode beside them: Python never caches what it compiles from a zip."""
    package = Path(anabranch.__file__).parent
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            inside = path.relative_to(package.parent)
            archive.write(path, inside)
            if path.suffix == ".py":
                bytecode = target.with_suffix(".pyc")
                compile_module(
                    str(path),
                    cfile=str(bytecode),
                    dfile=str(inside),
                    doraise=True,
                    invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
                )
                archive.write(bytecode, inside.with_suffix(".pyc"))
                bytecode.unlink()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def first_line(error: Exception) -> str:
    """What Spark has to say, without the trace and the query plan below it."""
    java = getattr(error, "java_exception", None)
    text = str(java.getMessage() or java) if java is not None else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

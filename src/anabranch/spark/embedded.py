"""A real standalone Spark cluster on this machine, from the pip package alone.

One Master, one Worker for the executors of the nodes it starts with, one core each, and one Worker
for every node that is added: processes that can be killed one by one, as on a cluster of machines.
The invariants: no process and no file
outlives the cluster, whether it is closed, its block raises, or its owner is killed (watchdog.py);
and every socket of it is on this machine only and asks for a secret, which is in a file that only
this user can read and, for executors, in the environment, but never in a command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark import __version__ as spark_version
from pyspark.find_spark_home import _find_spark_home
from pyspark.sql import SparkSession

from anabranch.driver.starting import announce
from anabranch.errors import ClusterError, ConfigError
from anabranch.spark import watchdog
from anabranch.spark.archive import ClassArchive, Making
from anabranch.spark.gateway import Gateway, end_gateway, tail
from anabranch.spark.java import find_java, said_by_java
from anabranch.spark.session import SHARES_FILES, executors
from anabranch.spark.settings import SETTINGS, is_owned, users_defaults

HOST = "127.0.0.1"
# Three nodes took 50 s in all to start on two cores with a load of six.
START_TIMEOUT_S = 180.0
POLL_S = 0.02
MAX_TEMPORARY_PATH = 35  # with 70 more bytes for the names of sockets; Linux takes 108
# A crashed process is seen by its closed connection; this is for one that hangs. Workers send a
# heartbeat every quarter of it.
WORKER_TIMEOUT_S = 12

# WARN to each process's own log; Master and Worker also say which port they got and who joined.
_LOG4J2 = """\
rootLogger.level = warn
rootLogger.appenderRef.log.ref = log
appender.log.type = Console
appender.log.name = log
appender.log.target = SYSTEM_ERR
appender.log.layout.type = PatternLayout
appender.log.layout.pattern = %d{yyyy-MM-dd HH:mm:ss.SSS} %p %c{1}: %m%n%ex
logger.master.name = org.apache.spark.deploy.master.Master
logger.master.level = info
logger.worker.name = org.apache.spark.deploy.worker.Worker
logger.worker.level = info
"""

# Without the secret no other user of this machine can run an application on the cluster, join it,
# or read a shuffle. Master, workers and driver read it from this file, and workers put it into the
# environment of their executors.
_DEFAULTS = """\
spark.authenticate true
spark.authenticate.secret {secret}
spark.ui.filters org.apache.spark.ui.JWSFilter
spark.org.apache.spark.ui.JWSFilter.param.secretKey {web_secret}
"""

# Both idle most of their life: the quick compiler and the small collector start fastest.
_DAEMON_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")

# Drivers and executors spend a third of a start in the optimising compiler, on code that slices do
# not need. It waits for ten times as many calls; what is hot has them within seconds.
_PATIENT_COMPILER = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)

# Settings that a JVM of a driver needs when it starts.
_AT_LAUNCH = ("spark.driver.", "spark.jars")

# Classes are looked for jar by jar. These have most of what a start loads: found first, they spare
# it a look into most of Spark's 280 jars, and a third of its CPU time.
_HOT = (
    *("scala-library", "spark-core", "log4j-core", "spark-config", "jackson-databind"),
    *("hadoop-client-runtime", "hadoop-client-api", "netty-common", "netty-transport"),
    *("log4j-api", "jackson-core", "netty-buffer", "spark-network-common", "spark-common-utils"),
    *("log4j-1.2-api", "jakarta.servlet-api", "log4j-layout-template-json", "metrics-core"),
    *("slf4j-api", "jackson-annotations", "netty-codec", "netty-handler", "scala-xml", "json4s"),
    # Of drivers and executors.
    *("spark-catalyst", "scala-reflect", "spark-sql", "janino", "commons-compiler", "parquet"),
    *("arrow", "antlr4-runtime", "jackson-module-scala", "kryo-shaded", "chill", "py4j", "ivy"),
    *("icu4j", "lz4-java", "spark-network-shuffle", "spark-unsafe", "spark-kvstore"),
)

T = TypeVar("T")


class EmbeddedCluster:
    """`nodes` workers of one core and `memory_mb` each; starts at once, ends with its block.

    `conf` are settings of Spark for its sessions. The JVM of the first session starts together
    with master and workers.
    """

    def __init__(
        self, nodes: int = 3, memory_mb: int = 1024, conf: Mapping[str, str] | None = None
    ) -> None:
        if nodes < 1:
            raise ConfigError(f"a cluster needs at least one node: nodes={nodes}")
        if memory_mb < 512:
            raise ConfigError(f"a Spark executor needs 512 MB or more: memory_mb={memory_mb}")
        if sys.platform != "linux":
            raise ClusterError("EmbeddedCluster reads /proc: run it on Linux")
        count = "one node" if nodes == 1 else f"{nodes} nodes"
        announce(f"starting a cluster of {count} on this machine")
        self._memory_mb = memory_mb
        self._conf = dict(conf or {})
        self._defaults = {k: v for k, v in users_defaults().items() if not is_owned(k, True)}
        self._gateway: Gateway | None = None
        self._java = find_java()
        self._archive = ClassArchive(self._java, _class_path(), spark_version)
        self._making: Making | None = None  # by the driver of the session
        temporary = tempfile.gettempdir()
        if len(temporary) > MAX_TEMPORARY_PATH:
            temporary = "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="anabranch-", dir=temporary))
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._room: dict[str, int] = {}  # executors that a worker can have
        self._started_workers = 0
        self._spark: SparkSession | None = None
        self._closed = False
        script = [sys.executable, "-I", "-S", watchdog.__file__]
        self._watchdog = subprocess.Popen(
            [*script, str(os.getpid()), str(self.directory)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            (self.directory / "sockets").mkdir()
            self._write_defaults()
            if SparkContext._active_spark_context is None:  # else there will be no session here
                self._gateway = self._launch({})
            self._master = self._start_daemon("master", "deploy.master.Master", ["--port", "0"])
            self.master_url = self._await_log(
                "master", r"Starting Spark master at (spark://\S+)", self._master
            )
            self._await_registered(self._start_worker(nodes))
            if self._gateway is not None:
                self._gateway.wait()  # it changes the environment of this process until then
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EmbeddedCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def session(self, app_name: str, conf: Mapping[str, str] | None = None) -> SparkSession:
        """A session on this cluster, once every worker's executor has joined it.

        It runs in a JVM of its own that ends with the cluster, or with the next session.
        """
        if SparkContext._active_spark_context is not None:
            raise ClusterError("this process has a Spark session already: call its stop() first")
        self._end_driver()
        announce("starting the driver")
        settings = self._settings(conf or {}) | {
            "spark.master": self.master_url,
            "spark.app.name": app_name,
        }
        first, self._gateway = self._gateway, None
        if first is None or any(key.startswith(_AT_LAUNCH) for key in conf or {}):
            if first is not None:
                first.end()
            first = self._launch(conf or {})
        gateway, self._making = first.wait(), first.making
        spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        try:
            with self.environment("driver"):
                context = SparkContext(conf=spark_conf, gateway=gateway)
            self._spark = spark = SparkSession(context)
        except Exception as e:  # a setting of the user's, say
            why = said_by_java(e, self.log("driver"))
            raise ClusterError(f"the Spark driver did not start: {why}") from e
        _clusters[context] = self
        told = -1

        def all_there() -> bool | None:
            nonlocal told
            joined, wanted = len(executors(spark)), self._room_in_all
            if joined != told:
                announce(f"waiting for nodes, {joined} of {wanted} are there")
                told = joined
            return joined >= wanted or None

        try:
            self._await(all_there, "not every worker's executor joined the session", "driver")
        except Py4JError:  # the driver's JVM ends when the master gives its application up
            raise ClusterError(f"the Spark driver ended: {self.tail('driver')}") from None
        return spark

    def add_node(self) -> str:
        """Start another worker and return its name; its executor joins a running session soon."""
        name = self._start_worker()
        self._await_registered(name)
        return name

    def make_room(self, nodes: int) -> None:
        """Start workers until there is room for this number of executors."""
        for _ in range(nodes - self._room_in_all):
            self._start_worker()

    @property
    def _room_in_all(self) -> int:
        return sum(self._room[name] for name in self.workers)

    @property
    def workers(self) -> dict[str, int]:
        """Worker name → pid of the workers that are alive."""
        return {name: p.pid for name, p in self._workers.items() if p.poll() is None}

    def executors(self) -> dict[str, tuple[int, str]]:
        """Executor id → (pid of its JVM, name of its worker), from the process table."""
        found = {}
        for pid in watchdog.members(str(self.directory)):
            command = _command_line(pid)
            if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
                executor_id = command[command.index("--executor-id") + 1]
                worker = watchdog.environment(pid).get(watchdog.WORKER_VARIABLE, "")
                found[executor_id] = (pid, worker)
        return dict(sorted(found.items(), key=lambda item: int(item[0])))

    def kill(self, pid: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal to one process of this cluster, and to no other process."""
        if pid not in watchdog.members(str(self.directory)):
            raise ClusterError(f"process {pid} is not alive or not part of this cluster", pid=pid)
        os.kill(pid, sig)

    def close(self) -> None:
        """End the session, every process and the directory; may be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._spark is not None and SparkContext._active_spark_context is not None:
                with contextlib.suppress(Exception):  # its JVM may be the one that died
                    self._spark.stop()
            if self._spark is not None:
                self._end_driver()
        finally:
            watchdog.end(str(self.directory))
            if self._gateway is not None:
                self._gateway.end()
                watchdog.end(str(self.directory))  # what it may have started meanwhile
            self._watchdog.kill()
            for process in [*self._workers.values(), getattr(self, "_master", None)]:
                if process is not None:
                    process.wait()
            self._watchdog.wait()

    def _write_defaults(self) -> None:
        """Nobody ever asks the web pages of master and workers: nobody gets their secret. The
        user's own spark-defaults.conf is for drivers; it may hold secrets, too."""
        ours = _DEFAULTS.format(secret=secrets.token_hex(32), web_secret=secrets.token_urlsafe(32))
        users = "".join(f"{key} {value}\n" for key, value in self._defaults.items())
        for name, text in (("conf", ours), ("driver-conf", users + ours)):
            directory = self.directory / name
            directory.mkdir()
            (directory / "log4j2.properties").write_text(_LOG4J2)
            path = directory / "spark-defaults.conf"
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(text)

    def _settings(self, conf: Mapping[str, str]) -> dict[str, str]:
        """Of a session, but for what stands in the user's spark-defaults.conf."""
        classes = ":".join([*map(str, _hot_jars()), f"{_jars()}/*"])
        options = " ".join([*_PATIENT_COMPILER, *self._archive.use()])
        ours = {
            **SETTINGS,
            "spark.driver.extraClassPath": classes,
            "spark.executor.extraClassPath": classes,
            "spark.driver.defaultJavaOptions": options,
            "spark.executor.defaultJavaOptions": options,
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.memory": f"{self._memory_mb}m",
            "spark.ui.enabled": "false",
            "spark.python.daemon.module": "anabranch.spark.worker_daemon",
            SHARES_FILES: "true",
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            # All who can connect to them are served, so they are where nobody else can look.
            "spark.python.unix.domain.socket.dir": str(self.directory / "sockets"),
        }
        return {k: v for k, v in ours.items() if k not in self._defaults} | self._conf | dict(conf)

    def _launch(self, conf: Mapping[str, str]) -> Gateway:
        """Start the JVM of a driver. It writes the archive of classes, if there is none yet and the
        user has no say in its command: the archive is to fit the next one's."""
        settings = self._settings(conf)
        theirs = {**self._defaults, **self._conf, **conf}
        making = None
        if not any(key.startswith("spark.driver.") for key in theirs):
            making = self._archive.make()
        if making is not None:
            settings["spark.driver.defaultJavaOptions"] += " " + " ".join(making.options)
        environment = partial(self.environment, "driver")
        return Gateway(settings, environment, self.log("driver"), making)

    def _end_driver(self) -> None:
        """End the JVM behind PySpark, which otherwise keeps settings and logs of a past session."""
        gateway, making, self._making = SparkContext._gateway, self._making, None
        SparkContext._gateway = None
        SparkContext._jvm = None
        if gateway is not None:
            end_gateway(gateway, making)

    def _variables(self, name: str) -> dict[str, str]:
        """What every process of the cluster inherits."""
        local = self.directory / name
        local.mkdir(exist_ok=True)
        return {
            watchdog.MEMBER_VARIABLE: str(self.directory),
            watchdog.WORKER_VARIABLE: name,
            "JAVA_HOME": str(self._java.home),
            "SPARK_HOME": _find_spark_home(),
            # The worker builds its executors' command and asks for it; Spark 4 has no other.
            "SPARK_SCALA_VERSION": "2.13",
            "PYSPARK_PYTHON": sys.executable,
            # The daemon that forks Python workers imports us before any file is shipped.
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(local),
            # Also keeps the user's spark-env.sh out.
            "SPARK_CONF_DIR": str(self.directory / ("driver-conf" if name == "driver" else "conf")),
        }

    @contextlib.contextmanager
    def environment(self, name: str) -> Iterator[None]:
        """PySpark gives its JVM a copy of os.environ and nothing else. Other threads see it, too,
        and start processes with variables of their own in the place of these."""
        variables = self._variables(name)
        before = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value

    def _start_worker(self, nodes: int = 1) -> str:
        self._started_workers += 1
        name = f"worker-{self._started_workers}"
        self._room[name] = nodes
        resources = ["--cores", str(nodes), "--memory", f"{nodes * self._memory_mb}M"]
        work = ["--work-dir", str(self.directory / name), self.master_url]
        self._workers[name] = self._start_daemon(
            name, "deploy.worker.Worker", [*resources, "--port", "0", *work]
        )
        return name

    def _start_daemon(self, name: str, main: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        """Java directly: spark-class would start a second JVM to build the same command."""
        properties = {
            "spark.worker.timeout": WORKER_TIMEOUT_S,
            "spark.master.rest.enabled": "false",
            "spark.deploy.maxExecutorRetries": "-1",  # nodes are killed here as often as one likes
        }
        command = [
            str(self._java.executable),
            *_DAEMON_OPTIONS,
            *self._archive.use(),
            *(f"-D{key}={value}" for key, value in properties.items()),
            "-cp",
            ":".join([*map(str, _hot_jars()), f"{_jars()}/*", f"{self.directory / 'conf'}"]),
            f"org.apache.spark.{main}",
            *("--host", HOST, "--webui-port", "0"),
            *arguments,
        ]
        with self.log(name).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._variables(name)},
                cwd=self.directory,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _await_registered(self, name: str) -> None:
        self._await_log(name, r"Successfully registered with master (\S+)", self._workers[name])

    def _await_log(self, name: str, pattern: str, process: subprocess.Popen[bytes]) -> str:
        def search() -> str | None:
            if process.poll() is not None:
                raise ClusterError(f"the {name} of the cluster ended at once: {self.tail(name)}")
            found = re.search(pattern, self.log(name).read_text(errors="replace"))
            return found.group(1) if found else None

        return self._await(search, f"the {name} of the cluster did not start", name)

    def _await(self, look: Callable[[], T | None], complaint: str, log_name: str) -> T:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{complaint} within {START_TIMEOUT_S:.0f} s: {self.tail(log_name)}"
                )
            time.sleep(POLL_S)
        return found

    def tail(self, name: str) -> str:
        return tail(self.log(name))


_clusters: WeakKeyDictionary[Any, EmbeddedCluster] = WeakKeyDictionary()


def make_room(spark: SparkSession, nodes: int) -> None:
    """For this number of nodes, if the session is one of a cluster on this machine."""
    cluster = _clusters.get(spark.sparkContext)
    if cluster is not None:
        cluster.make_room(nodes)


def _jars() -> Path:
    return Path(_find_spark_home()) / "jars"


def _hot_jars() -> list[Path]:
    return [jar for name in _HOT for jar in sorted(_jars().glob(f"{name}[-_]*.jar"))]


def _class_path() -> list[Path]:
    """As every JVM of the cluster has it. Directories come last: with one before them, classes of a
    jar cannot be archived."""
    return [*_hot_jars(), *sorted(_jars().glob("*.jar"))]


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []

"""A real standalone Spark cluster on this machine, from the pip package alone.

One Master and, per node, one Worker that hosts one executor of one core: processes that can be
killed and added one by one, as on a cluster of machines. The invariants: no process and no file
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
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.sql import SparkSession

from anabranch.errors import ClusterError, ConfigError
from anabranch.spark import watchdog
from anabranch.spark.java import find_java
from anabranch.spark.session import SETTINGS, executors

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

T = TypeVar("T")


class EmbeddedCluster:
    """`nodes` workers of one core and `memory_mb` each; starts at once, ends with its block."""

    def __init__(self, nodes: int = 3, memory_mb: int = 1024) -> None:
        if nodes < 1:
            raise ConfigError(f"a cluster needs at least one node: nodes={nodes}")
        if memory_mb < 512:
            raise ConfigError(f"a Spark executor needs 512 MB or more: memory_mb={memory_mb}")
        if sys.platform != "linux":
            raise ClusterError("EmbeddedCluster reads /proc: run it on Linux")
        self._memory_mb = memory_mb
        self._java = find_java()
        temporary = tempfile.gettempdir()
        if len(temporary) > MAX_TEMPORARY_PATH:
            temporary = "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="anabranch-", dir=temporary))
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
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
            (self.directory / "conf").mkdir()
            (self.directory / "conf" / "log4j2.properties").write_text(_LOG4J2)
            (self.directory / "sockets").mkdir()
            self._write_secrets(self.directory / "conf" / "spark-defaults.conf")
            self._master = self._start_daemon("master", "deploy.master.Master", ["--port", "0"])
            self.master_url = self._await_log(
                "master", r"Starting Spark master at (spark://\S+)", self._master
            )
            names = [self._start_worker() for _ in range(nodes)]
            for name in names:
                self._await_registered(name)
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
        _end_driver()
        settings = {**SETTINGS, **self._driver_settings(app_name), **(conf or {})}
        spark_conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        with self._environment("driver"), self._log("driver").open("ab") as log:
            gateway = launch_gateway(spark_conf, {"stderr": log})
            context = SparkContext(conf=spark_conf, gateway=gateway)
        self._spark = spark = SparkSession(context)
        _clusters[context] = self
        try:
            self._await(
                lambda: len(executors(spark)) >= len(self.workers) or None,
                "not every worker's executor joined the session",
                "driver",
            )
        except Py4JError:  # the driver's JVM ends when the master gives its application up
            raise ClusterError(f"the Spark driver ended: {self._tail('driver')}") from None
        return spark

    def add_node(self) -> str:
        """Start another worker and return its name; its executor joins a running session soon."""
        name = self._start_worker()
        self._await_registered(name)
        return name

    def make_room(self, nodes: int) -> None:
        """Start workers for so many more executors, where none is free for them."""
        free = len(self.workers) - len(self.executors())
        for _ in range(nodes - free):
            self._start_worker()

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
                _end_driver()
        finally:
            watchdog.end(str(self.directory))
            self._watchdog.kill()
            for process in [*self._workers.values(), getattr(self, "_master", None)]:
                if process is not None:
                    process.wait()
            self._watchdog.wait()

    def _write_secrets(self, path: Path) -> None:
        """Nobody ever asks the web pages of master and workers: nobody gets their secret."""
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(
            _DEFAULTS.format(secret=secrets.token_hex(32), web_secret=secrets.token_urlsafe(32))
        )

    def _driver_settings(self, app_name: str) -> dict[str, str]:
        return {
            "spark.master": self.master_url,
            "spark.app.name": app_name,
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.executor.memory": f"{self._memory_mb}m",
            "spark.ui.enabled": "false",
            "spark.python.daemon.module": "anabranch.spark.worker_daemon",
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            # Whoever can connect to them is served, so they are where nobody else can look.
            "spark.python.unix.domain.socket.dir": str(self.directory / "sockets"),
        }

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
            # Also keeps the user's spark-defaults.conf and spark-env.sh out.
            "SPARK_CONF_DIR": str(self.directory / "conf"),
        }

    @contextlib.contextmanager
    def _environment(self, name: str) -> Iterator[None]:
        """PySpark gives its JVM a copy of os.environ and nothing else."""
        before = dict(os.environ)
        os.environ.update(self._variables(name))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def _start_worker(self) -> str:
        self._started_workers += 1
        name = f"worker-{self._started_workers}"
        resources = ["--cores", "1", "--memory", f"{self._memory_mb}M"]
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
            *(f"-D{key}={value}" for key, value in properties.items()),
            "-cp",
            f"{self.directory / 'conf'}:{_find_spark_home()}/jars/*",
            f"org.apache.spark.{main}",
            *("--host", HOST, "--webui-port", "0"),
            *arguments,
        ]
        with self._log(name).open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._variables(name)},
                cwd=self.directory,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _await_registered(self, name: str) -> None:
        self._await_log(name, r"Successfully registered with master (\S+)", self._workers[name])

    def _await_log(self, name: str, pattern: str, process: subprocess.Popen[bytes]) -> str:
        def search() -> str | None:
            if process.poll() is not None:
                raise ClusterError(f"the {name} of the cluster ended at once: {self._tail(name)}")
            found = re.search(pattern, self._log(name).read_text(errors="replace"))
            return found.group(1) if found else None

        return self._await(search, f"the {name} of the cluster did not start", name)

    def _await(self, look: Callable[[], T | None], complaint: str, log_name: str) -> T:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{complaint} within {START_TIMEOUT_S:.0f} s: {self._tail(log_name)}"
                )
            time.sleep(POLL_S)
        return found

    def _tail(self, name: str) -> str:
        return self._log(name).read_text(errors="replace")[-500:].strip() or "its log is empty"


_clusters: WeakKeyDictionary[Any, EmbeddedCluster] = WeakKeyDictionary()


def make_room(spark: SparkSession, nodes: int) -> None:
    """For so many more nodes, if the session is one of a cluster on this machine."""
    cluster = _clusters.get(spark.sparkContext)
    if cluster is not None:
        cluster.make_room(nodes)


def _end_driver() -> None:
    """End the JVM behind PySpark, which otherwise keeps settings and logs of a past session."""
    gateway = SparkContext._gateway
    if gateway is None:
        return
    SparkContext._gateway = None
    SparkContext._jvm = None
    with contextlib.suppress(Exception):  # a JVM that is gone cannot say goodbye
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.stdin.close()
        process.kill()
        process.wait()


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []

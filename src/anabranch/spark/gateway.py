"""The JVM behind a session of PySpark's: started beside others, ended for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pyspark import SparkConf
from pyspark.java_gateway import launch_gateway

from anabranch.errors import ClusterError
from anabranch.spark.archive import MIN_CLASSES, Making


class Gateway:
    """The JVM of a driver, started by a thread of its own while others start, too."""

    def __init__(
        self,
        settings: Mapping[str, str],
        environment: Callable[[], AbstractContextManager[None]],
        log: Path,
        making: Making | None,
    ) -> None:
        """In an `environment`, which is that of this whole process for a while; a `making` is the
        archive of classes that it leaves."""
        self._environment = environment
        self._log = log
        self.making = making
        self._conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
        self._found: Any = None
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._launch, name="anabranch-jvm", daemon=True)
        self._thread.start()

    def _launch(self) -> None:
        try:
            with self._environment(), self._log.open("ab") as log:
                self._found = launch_gateway(self._conf, {"stderr": log})
        except BaseException as e:
            self._problem = e

    def wait(self) -> Any:
        self._thread.join()
        if self._problem is not None:
            raise ClusterError(
                f"the Spark driver did not start: {tail(self._log)}"
            ) from self._problem
        return self._found

    def end(self) -> None:
        self._thread.join()
        if self._found is not None:
            end_gateway(self._found)


def end_gateway(gateway: Any, making: Making | None = None) -> None:
    classes = 0
    with contextlib.suppress(Exception):  # a JVM that is gone cannot say goodbye
        if making is not None:
            management = gateway.jvm.java.lang.management.ManagementFactory
            classes = management.getClassLoadingMXBean().getLoadedClassCount()
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is not None:
        process.stdin.close()  # which it takes for its end
        if making is not None and classes >= MIN_CLASSES:
            making.finish(process)
        process.kill()
        process.wait()


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:].strip() or "its log is empty"

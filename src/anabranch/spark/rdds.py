"""RDDs of blobs that Spark makes in its JVM, without a Python RDD around them.

The classes are reached through PySpark's gateway: `ParallelCollectionRDD` with preferred locations,
`PythonRDD` for a stage that runs a function, and `PairwiseRDD`, how PySpark shuffles pairs of raw
frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.core.rdd import _prepare_for_python_RDD
from pyspark.serializers import NoOpSerializer

OUT = NoOpSerializer()  # also for the answers of a job, whose end the JVM does not mark


class Rdds:
    """Of one Spark context."""

    def __init__(self, sc: Any) -> None:
        self._sc = sc
        self._jvm = sc._jvm
        self._python = self._jvm.org.apache.spark.api.python.PythonUtils
        byte_array = self._jvm.java.lang.Class.forName("[B")
        self._bytes_tag = self._jvm.scala.reflect.ClassTag.apply(byte_array)
        self._partitioners: dict[int, Any] = {}

    def collection(self, heads: Sequence[bytes], where: Sequence[Any], count: int = 1) -> Any:
        """One partition per head, each preferring its place, of `count` elements each."""
        elements = self._jvm.java.util.ArrayList()
        locations = self._jvm.java.util.HashMap()
        for i, (head, location) in enumerate(zip(heads, where, strict=True)):
            elements.add(bytearray(head))
            if count > 1:
                padding = self._jvm.java.util.Collections.nCopies(count - 1, bytearray())
                elements.addAll(padding)
            locations.put(i, location)
        rdd = self._jvm.org.apache.spark.rdd.ParallelCollectionRDD(
            self._sc._jsc.sc(),
            self._python.toSeq(elements),
            len(heads),
            self._python.toScalaMap(locations),
            self._bytes_tag,
        )
        return rdd.toJavaRDD()

    def pinned(self, rdd: Any, chosen: Sequence[bool], location: Any) -> Any:
        """These partitions of it, each preferring one place.

        The only RDD in Spark's own classes that adds a preference to another one without reading
        it is a Cartesian product, here of every partition with a single empty element that is
        pinned.
        """
        mask = self._jvm.java.util.ArrayList()
        for wanted in chosen:
            mask.add(wanted)
        pruned = self._jvm.org.apache.spark.rdd.PartitionPruningRDD(
            rdd, self._python.toSeq(mask), self._bytes_tag
        )
        return pruned.toJavaRDD().cartesian(self.collection([b""], [location]))

    def function(self, function: Any, deserializer: Any) -> Any:
        """A Python function from frames to frames, as the JVM's PythonRDD takes it."""
        sc = self._sc
        command = (function, None, deserializer, OUT)
        pickled, broadcasts, environment, includes = _prepare_for_python_RDD(sc, command)
        # No accumulator: with one, Spark's scheduler thread calls back into this process after
        # every task and waits for the answer, though there is never anything to add.
        return self._jvm.SimplePythonFunction(
            bytearray(pickled), environment, includes, sc.pythonExec, sc.pythonVer, broadcasts, None
        )

    def stage(self, jrdd: Any, function: Any) -> Any:
        """The function on every partition, in Python."""
        return self._jvm.PythonRDD(jrdd.rdd(), function, True, False).asJavaRDD()

    def shuffle(self, frames: Any, nodes: int) -> tuple[Any, int]:
        """The blobs where they belong, and the number by which Spark knows this shuffle."""
        if nodes not in self._partitioners:
            # Any partitioner with as many partitions as nodes: the frames carry the partition.
            self._partitioners[nodes] = self._jvm.PythonPartitioner(nodes, id(self))
        pairs = self._jvm.PairwiseRDD(frames.rdd()).asJavaPairRDD()
        shuffled = pairs.partitionBy(self._partitioners[nodes])
        return shuffled.values(), shuffled.rdd().dependencies().head().shuffleId()

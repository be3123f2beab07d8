"""What a user writes: a lazy topology of named operators, then one `run` or `start`.

    topology = Topology("word_count")
    words = topology.source("lines", read_lines).flat_map("split", split_words)
    words.key_by("word").aggregate("count", n=count()).to("out", Parquet("counts"))
    topology.run(spark, checkpoint="checkpoints/word_count")

Nothing runs, and Spark is not needed, until `start` or `run`.
"""

from anabranch.api.describing import describe
from anabranch.api.job import Job
from anabranch.api.streams import KeyedStream, Stream, WindowedStream
from anabranch.api.topology import Topology

__all__ = ["Job", "KeyedStream", "Stream", "Topology", "WindowedStream", "describe"]

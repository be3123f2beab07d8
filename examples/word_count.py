"""G3: words counted in windows of 30 seconds (Source → Splitter → Counter → Sink).

anabranch run examples.word_count:topology --nodes 3 --checkpoint /tmp/word-count
"""

from __future__ import annotations

import os
from typing import Any

import polars as pl

import anabranch as ab

INPUT = os.environ.get("WORD_COUNT_INPUT", "/tmp/word-count/in")
OUTPUT = os.environ.get("WORD_COUNT_OUTPUT", "/tmp/word-count/out")


def read_sentences(spark: Any) -> Any:
    """Parquet files with the columns ts and sentence."""
    return spark.readStream.schema("ts timestamp, sentence string").parquet(INPUT)


def split_words(sentences: pl.DataFrame) -> pl.DataFrame:
    return sentences.select("ts", word=pl.col("sentence").str.split(" ")).explode("word")


def word_count(data: Any, sink: Any, parallelism: int = 2) -> ab.Topology:
    """The topology on any source of (ts, sentence)."""
    topology = ab.Topology("word_count")
    (
        topology.source("sentences", data, time="ts")
        .flat_map("splitter", split_words)
        .key_by("word")
        .window(ab.tumbling("30s"), time="ts")
        .aggregate("counter", n=ab.count(), parallelism=parallelism)
        .to("counts", sink)
    )
    return topology


topology = word_count(read_sentences, ab.Parquet(OUTPUT))

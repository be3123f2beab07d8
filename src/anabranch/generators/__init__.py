"""Seeded streams to try, test and measure with: every row follows from the seed and its number.

    tweets = Tweets(seed=1, rate=1000)
    tweets.rows(0, 10)

Any range of rows can be read at any time, in any process, and is always the same. No Spark here;
`anabranch.spark.generated` makes a Spark stream of any of them.
"""

from __future__ import annotations

from anabranch.generators.base import START, Generator
from anabranch.generators.skewed_keys import SkewedKeys
from anabranch.generators.text import NEGATIVE, POSITIVE, Sentences, Tweets
from anabranch.generators.traffic import Incidents, VehiclePositions

__all__ = [
    "NEGATIVE",
    "POSITIVE",
    "START",
    "Generator",
    "Incidents",
    "Sentences",
    "SkewedKeys",
    "Tweets",
    "VehiclePositions",
]

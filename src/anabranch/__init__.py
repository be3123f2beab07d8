"""Anabranch: reliable, elastic, balanced stream processing on PySpark."""

__version__ = "0.1.0"

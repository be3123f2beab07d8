"""Kernels as JSON, so that a checkpoint says what its state means without the code of the job.

Two uses: a restart compares the settings of a stateful operator with those its state was made
with, and a reader of state makes the operator's empty state anew and loads the files into it, as
a restart would. Kernels are frozen dataclasses of plain values; what has no form here, such as a
user's function, is written as opaque: it is not compared and read back as None. A class is named by
its module, wherever below `operators` that is.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import importlib
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa

CLASS = "class"
OPAQUE = "opaque"
_PACKAGE = "anabranch.operators."
_ROOMS = ("", "kernels.", "functions.", "state.", "rows.")


def encode(value: Any) -> Any:
    """The JSON form of a kernel or of one of its settings."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if isinstance(value, Mapping):  # in order: the order of aggregates may matter to their state
        return {CLASS: "dict", "items": [[k, encode(v)] for k, v in value.items()]}
    if isinstance(value, timedelta):
        return {CLASS: "timedelta", "us": value // timedelta(microseconds=1)}
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind.__module__.startswith(_PACKAGE):
        name = f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return {CLASS: name, **{f: encode(getattr(value, f)) for f in fields}}
    return {CLASS: OPAQUE}


def decode(data: Any) -> Any:
    """What `encode` was given, as far as it has a form; raises ValueError for an unknown class."""
    if isinstance(data, list):
        return tuple(decode(v) for v in data)
    if not isinstance(data, dict):
        return data
    if data[CLASS] == OPAQUE:
        return None
    if data[CLASS] == "dict":
        return {k: decode(v) for k, v in data["items"]}
    if data[CLASS] == "timedelta":
        return timedelta(microseconds=data["us"])
    fields = {k: decode(v) for k, v in data.items() if k != CLASS}
    return _class(data[CLASS])(**fields)


def _class(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    found = None
    for room in _ROOMS:
        with contextlib.suppress(ImportError):
            place = importlib.import_module(_PACKAGE + room + module)
            found = found or getattr(place, attribute, None)
    if found is None:
        raise ValueError(f"there is no {name} in this version")
    if not dataclasses.is_dataclass(found):  # a checkpoint names kernels, never what to call
        raise ValueError(f"{name} is no kernel")
    return found


def encode_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def decode_schema(data: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(data)))

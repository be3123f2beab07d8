"""The user's code on its way to nodes: pickled by value, so that nodes need not have it.

cloudpickle sends functions of `__main__` whole but functions of other modules by name. A job's
own modules are not installed on the executors, so they are registered to be sent whole too;
installed packages, the standard library and Anabranch itself are not.

What cannot be sent (a lock, an open file, a Spark session that a function uses) is found by
pickling the parts one by one, and named.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from pyspark.cloudpickle import cloudpickle

from anabranch.errors import TopologyError
from anabranch.node.arrow.job import JobSpec

log = logging.getLogger("anabranch")
LARGE = 64 << 20  # several tables of `enrich` at their largest
_DEPTH = 8  # how far below an operator the search for what cannot be sent goes


def pickle_spec(spec: JobSpec) -> bytes:
    """The job as nodes get it; a TopologyError names what cannot travel, and who uses it."""
    kernels = {n: o.kernel for p in spec.programs.values() for n, o in p.operators.items()}
    try:
        pickled = pickle_job(spec)
    except Exception:
        for name, part in {**kernels, **spec.sinks}.items():
            if culprit := _culprit("it", part):
                raise TopologyError(
                    f"operator {name!r} cannot be sent to nodes: {culprit} cannot be pickled; make "
                    "it inside the function, or have the function use plain values only",
                    operator=name,
                ) from None  # the pickler's trace has no line of the user's
        raise
    if len(pickled) > LARGE:
        sizes = {name: len(pickle_job(kernel)) for name, kernel in kernels.items()}
        largest = max(sizes, key=lambda name: sizes[name])
        log.warning(
            "operator %r takes %d MB to every node with each start and recovery: its function uses "
            "large data; read it inside the function, or add it with .enrich(...)",
            largest,
            sizes[largest] >> 20,
        )
    return pickled


def _culprit(name: str, value: Any, depth: int = _DEPTH) -> str | None:
    """What in a value, or used by it, cannot be pickled; None if all can."""
    try:
        pickle_job(value)
        return None
    except Exception:
        for inner, part in _parts(value).items() if depth else ():
            if found := _culprit(inner, part, depth - 1):
                by = getattr(value, "__qualname__", "")
                return f"{found}, used by {by}" if by and "used by" not in found else found
        kind = type(value)
        return f"{name} ({kind.__module__}.{kind.__qualname__})"


def _parts(value: Any) -> dict[str, Any]:
    """What a value is made of, by name."""
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        return {**used.globals, **used.nonlocals}
    if isinstance(value, MethodType):
        return {value.__func__.__name__: value.__func__, "self": value.__self__}
    if isinstance(value, functools.partial):
        return {"func": value.func, **_parts(value.args), **value.keywords}
    if isinstance(value, Mapping):
        return {str(k): v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": v for i, v in enumerate(value)}
    slots = (s for kind in type(value).__mro__ for s in getattr(kind, "__slots__", ()))
    found = {s: getattr(value, s) for s in slots if hasattr(value, s)}
    return {**found, **getattr(value, "__dict__", {})}


def pickle_job(job: Any) -> bytes:
    """The job with every function of the user's own modules by value."""
    registered = [m for m in list(sys.modules.values()) if _is_users(m)]
    known = cloudpickle.list_registry_pickle_by_value()
    added = [m for m in registered if m.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(job))
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(module: ModuleType) -> bool:
    name = getattr(module, "__name__", "")
    file = getattr(module, "__file__", None)
    if not file or name == "__main__" or name.partition(".")[0] == "anabranch":
        return False
    return not _is_installed(file)


@functools.cache  # a thousand modules are looked at whenever a job starts
def _is_installed(file: str) -> bool:
    path = Path(file).absolute()
    return any(path.is_relative_to(p) for p in _INSTALLED)


_INSTALLED = tuple(
    {Path(sysconfig.get_path(p)).absolute() for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {Path(p).absolute() for p in sys.path if Path(p).name in ("site-packages", "dist-packages")}
)

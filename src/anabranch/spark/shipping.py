"""The user's code on its way to nodes: pickled by value, so that nodes need not have it.

cloudpickle sends functions of `__main__` whole but functions of other modules by name. A job's
own modules are not installed on the executors, so they are registered to be sent whole too;
installed packages, the standard library and Anabranch itself are not.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark.cloudpickle import cloudpickle


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
    path = Path(file).absolute()
    return not any(path.is_relative_to(p) for p in _INSTALLED)


_INSTALLED = tuple(
    {Path(sysconfig.get_path(p)).absolute() for p in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {Path(p).absolute() for p in sys.path if Path(p).name in ("site-packages", "dist-packages")}
)

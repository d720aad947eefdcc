"""The package llama_cpp without what it imports at once.

Only its module llama_cpp.llama_cpp is used here. The rest (chat formats, jinja2, a disk cache) takes as long
to import as NumPy; it is imported when something of it is asked for, by whoever imports llama_cpp.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
from types import ModuleType
from typing import Any

_VERSION = re.compile(r"^__version__\s*=\s*[\"']([^\"']+)", re.MULTILINE)


class LatePackage(ModuleType):
    """A package whose __init__ runs when a name is asked for that is not there yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__dict__["_running"] = threading.RLock()
        self.__dict__["_has_run"] = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):  # asked of any module by tools
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with self._running:
            if not self._has_run:
                self.__dict__["_has_run"] = True
                spec = self.__spec__
                assert spec is not None and spec.loader is not None
                spec.loader.exec_module(self)
        if name not in self.__dict__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return self.__dict__[name]


def late_package(name: str) -> ModuleType:
    """The package, run or not; from now on it is what `import` gives. Raises ModuleNotFoundError."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = LatePackage(name)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__, module.__package__ = spec.submodule_search_locations, name
    sys.modules[name] = module
    return module


def version_of(package: ModuleType) -> str:
    """Its __version__, for which it is not run; "unknown" if it has none."""
    if "__version__" in package.__dict__:
        return str(package.__dict__["__version__"])
    try:
        with open(package.__file__ or "", encoding="utf-8", errors="replace") as file:
            found = _VERSION.search(file.read())
    except OSError:
        return "unknown"
    return found[1] if found else "unknown"

"""The llama_cpp package that is installed with this one, after its library was found to be ours."""

from __future__ import annotations

import importlib
from typing import Any, Final

from ..native.library import import_binding

binding: Final[Any] = import_binding()
llama: Final[Any] = importlib.import_module("llama_cpp.llama")
chat_format: Final[Any] = importlib.import_module("llama_cpp.llama_chat_format")

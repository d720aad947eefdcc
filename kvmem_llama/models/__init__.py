"""From what a user calls a model to the path of a GGUF file: local files, the built-in model, the hub."""

from __future__ import annotations

from .hub import HubName, pick_gguf, pull
from .local import LocalModel, choice_file, choose, chosen, local_models, models_folder
from .naming import BUILT_IN, check, find, resolve
from .packaged import DEFAULT_MODEL, Notify, PackagedModel, WheelPart, fetch_packaged

__all__ = [
    "BUILT_IN",
    "DEFAULT_MODEL",
    "HubName",
    "LocalModel",
    "Notify",
    "PackagedModel",
    "WheelPart",
    "check",
    "choice_file",
    "choose",
    "chosen",
    "fetch_packaged",
    "find",
    "local_models",
    "models_folder",
    "pick_gguf",
    "pull",
    "resolve",
]

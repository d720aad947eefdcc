"""A model of the Hugging Face hub as llama_cpp.Llama.from_pretrained fetches it: by a pattern of its name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import KvmemError, ModelNotFound
from ..models.hub import HubName, client, refusal

Folder = str | os.PathLike[str]


def fetch(repo_id: str, patterns: Sequence[str], local_dir: Folder | None, cache_dir: Folder | None) -> Path:
    """Fetches the one file of the repository that each pattern matches -> the path of the first.

    local_dir, cache_dir: where they go to, as for huggingface_hub.hf_hub_download.
    Raises ModelNotFound: no client, no network, no such repository, no file or several for a pattern.
    """
    name = HubName(repo_id)
    hub = client(name)
    endpoint: str = hub.constants.ENDPOINT
    try:
        files: list[str] = hub.HfApi(endpoint=endpoint).list_repo_files(repo_id)
        chosen = [_the_one(repo_id, files, pattern) for pattern in patterns]
        paths = [
            hub.hf_hub_download(repo_id, file, local_dir=local_dir, cache_dir=cache_dir, endpoint=endpoint)
            for file in chosen
        ]
    except KvmemError:
        raise
    except Exception as error:  # the client raises its own, requests' and httpx' errors
        raise refusal(name, error, endpoint) from error
    return Path(paths[0])


def _the_one(repo_id: str, files: Sequence[str], pattern: Any) -> str:
    found = [file for file in files if fnmatch(file, pattern)]
    if len(found) == 1:
        return found[0]
    why = f"no file of it matches {pattern!r}" if not found else f"{len(found)} files match {pattern!r}"
    raise ModelNotFound(repo_id, why, hint=f"It holds {', '.join(found or files)[:2000]}.")

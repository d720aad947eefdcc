"""Records the answers of a stock llama-server, for machines that have none.

python tests/compat/record.py PROGRAM MODEL [NAME ...]

NAME: of request files, requests_NAME.json or agent_NAME.json; none: all. Each is asked in order on a fresh
server.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from servers import AGENT_FLAGS, FLAGS, in_here, requests_of, stock_server

HERE: Final = Path(__file__).parent
RECORDED: Final = HERE / "recorded"
PIN: Final = HERE.parents[1] / "vendor" / "pin.toml"


def record(program: Path, model: Path, path: Path) -> dict[str, Any]:
    """The answers by id of request of a file, and what they were made with."""
    flags = AGENT_FLAGS if path.name.startswith("agent_") else ()
    with (
        tempfile.TemporaryDirectory() as folder,
        stock_server(program, model, Path(folder), *in_here(flags)) as server,
    ):
        answers = {request.id: server.ask(request).as_json() for request in requests_of(path)}
    return {
        "llama_cpp_commit": tomllib.loads(PIN.read_text())["llama_cpp_commit"],
        "model": model.name,
        "flags": [*FLAGS, *flags],
        "answers": _without_paths(answers, str(model)),
    }


def _without_paths(value: Any, path: str) -> Any:
    """Where the model lies is nobody's business."""
    return json.loads(json.dumps(value).replace(json.dumps(path)[1:-1], "<model>"))


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__)
        return 2
    program, model = Path(arguments[0]).absolute(), Path(arguments[1]).absolute()
    found = sorted([*HERE.glob("requests_*.json"), *HERE.glob("agent_*.json")])
    paths = {path.stem.partition("_")[2]: path for path in found}
    for name in arguments[2:] or paths:
        text = json.dumps(record(program, model, paths[name]), ensure_ascii=False, indent=1)
        (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"recorded/{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

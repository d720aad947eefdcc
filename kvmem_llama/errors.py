"""Every error a user of kvmem_llama can meet, and the exit code of each.

    KvmemError
      ModelError          ModelNotFound, ModelCorrupt, ModelUnsupported
      LibraryError        LibraryMissing, LibraryMismatch, KernelsMissing
      BudgetError         MandatoryTooLarge, DoesNotFit, InvalidOption, InvalidRequest, NotOffered
      EngineError         DecodeFailed, CaptureMismatch, HookFailed, EngineClosed, TemplateUnsupported,
                          OutputMismatch
      WorkspaceError      WorkspaceClosed, WorkspaceBusy, InputError
        StoreError        WorkspaceNotFound, WorkspaceExists, InvalidName, StoreLocked, WorkspaceMismatch,
                          FormatTooNew, FormatTooOld, StoreFull, StoreFailed
          StoreDamaged    RecordDamaged, CatalogDamaged, ExportDamaged
      Cancelled

`what` says what happened, with the numbers; `hint` says what to do about it. `str(error)` is both.
"""

from __future__ import annotations

from os import PathLike
from typing import Final

_REBUILD: Final = "Reinstall with `pip install .` from the source tree, then run `kvmem doctor`."
_REPORT: Final = "This is a defect of kvmem_llama; please report it with the output of `kvmem doctor`."


class KvmemError(Exception):
    """Root of the tree: `what` happened (no final full stop) and a `hint` (whole sentences)."""

    def __init__(self, what: str, *, hint: str) -> None:
        super().__init__(f"{what}. {hint}" if hint else what)
        self.what = what
        self.hint = hint


class ModelError(KvmemError):
    """The model file cannot be used."""


class ModelNotFound(ModelError):
    """There is no readable model file at `path`."""

    def __init__(self, path: str | PathLike[str], why: str = "no such file", *, hint: str = "") -> None:
        super().__init__(
            f"model {str(path)!r}: {why}",
            hint=hint or "Give the path of a GGUF file, or a name that `kvmem model ls` shows.",
        )
        self.path = str(path)


class ModelCorrupt(ModelError):
    """The file at `path` is not a whole, well-formed GGUF file."""

    def __init__(self, path: str | PathLike[str], why: str, *, hint: str = "") -> None:
        super().__init__(
            f"model {str(path)!r} is damaged or not a GGUF file: {why}",
            hint=hint or "Copy or download the file again and compare its size and checksum with the source.",
        )
        self.path = str(path)


class ModelUnsupported(ModelError):
    """A sound model whose architecture `arch` cannot do what was asked; the hint says what still works."""

    def __init__(self, arch: str, reason: str, *, hint: str) -> None:
        super().__init__(f"architecture {arch!r:.80} is not supported here: {reason}", hint=hint)
        self.arch = arch
        self.reason = reason


class LibraryError(KvmemError):
    """The native libraries are missing or are not the ones this package was built with."""


class LibraryMissing(LibraryError):
    """The patched llama.cpp library, or its Python binding, was not found."""

    def __init__(self, what: str, *, hint: str = _REBUILD) -> None:
        super().__init__(what, hint=hint)


class LibraryMismatch(LibraryError):
    """A library was found, but it is a stock or stale one (patch id, ABI version or struct size differs)."""

    def __init__(self, what: str, *, hint: str = _REBUILD) -> None:
        super().__init__(what, hint=hint)


class KernelsMissing(LibraryError):
    """The library of scoring and restore loops (libkvmem_kernels) was not found or cannot be used."""

    def __init__(self, what: str, *, hint: str = _REBUILD) -> None:
        super().__init__(what, hint=hint)


class BudgetError(KvmemError):
    """What was asked does not fit the limits that were set."""


class MandatoryTooLarge(BudgetError):
    """The hard set of a step (`n_needed` tokens) does not fit the execution view (`n_view` tokens)."""

    def __init__(self, n_needed: int, n_view: int, *, hint: str = "") -> None:
        super().__init__(
            f"this step needs {n_needed} tokens in the view, which holds {n_view}",
            hint=hint or "Use a larger view (-c), a shorter question, fewer pins or a smaller --n-reserve.",
        )
        self.n_needed = n_needed
        self.n_view = n_view


class DoesNotFit(BudgetError):
    """An engine with these options takes more memory than there is; `what` has the numbers."""


class InvalidOption(BudgetError):
    """Option `name` has a `value` that it cannot take."""

    def __init__(self, name: str, value: object, why: str, *, hint: str = "") -> None:
        given = name if value is True else f"{name} = {value!r}"  # a flag has no value of its own
        super().__init__(f"{given}: {why}", hint=hint or "See docs/options.md.")
        self.name = name
        self.value = value
        self.why = why


class NotOffered(BudgetError, AttributeError):
    """`what` of another library's class has no counterpart here."""

    def __init__(self, what: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"{what} is not offered: {why}", hint=hint or "Use llama_cpp.Llama itself for this.")


class InvalidRequest(BudgetError):
    """Messages, tools or a JSON schema that cannot be used as they are.

    invalid_argument: llama-server answers 400 to this one; otherwise 500.
    """

    def __init__(self, why: str, *, hint: str = "", invalid_argument: bool = True) -> None:
        super().__init__(why, hint=hint or "Correct this part of the request; nothing was evaluated.")
        self.why = why
        self.invalid_argument = invalid_argument


class EngineError(KvmemError):
    """llama.cpp, or what runs it, failed."""


class DecodeFailed(EngineError):
    """llama_decode returned `rc` (not 0)."""

    def __init__(self, rc: int, what: str = "", *, hint: str = "") -> None:
        super().__init__(
            what or f"llama_decode failed with code {rc}",
            hint=hint or "The step was rolled back. Run again with --verbose to see llama.cpp's messages.",
        )
        self.rc = rc


class CaptureMismatch(EngineError):
    """The rows captured by a decode call are not the rows of the tokens sent."""

    def __init__(self, expected: object, got: object, *, hint: str = _REPORT) -> None:
        super().__init__(
            f"captured rows differ from the tokens sent: expected {expected}, got {got}", hint=hint
        )
        self.expected = expected
        self.got = got


class HookFailed(EngineError):
    """A call into the patched library returned `code` (negative) with a `text`."""

    def __init__(self, code: int, text: str, *, hint: str = _REPORT) -> None:
        super().__init__(f"memory hook failed with code {code}: {text}", hint=hint)
        self.code = code
        self.text = text


class EngineClosed(EngineError):
    """The engine was closed, or its owner thread died, before the work could be done."""

    def __init__(self, what: str = "the engine is closed", *, hint: str = "") -> None:
        super().__init__(what, hint=hint or "Open a new engine; the workspaces of this one are gone.")


class TemplateUnsupported(EngineError):
    """The model's chat template cannot be rendered. invalid_argument: as in InvalidRequest."""

    def __init__(self, why: str, *, hint: str = "", invalid_argument: bool = False) -> None:
        super().__init__(
            f"chat template: {why}",
            hint=hint or "Use another one: --chat-template-file FILE, or --chat-template chatml.",
        )
        self.why = why
        self.invalid_argument = invalid_argument


class OutputMismatch(EngineError):
    """What the model wrote is not what its chat template, or the grammar of the answer, says it writes."""

    def __init__(self, why: str, *, hint: str = "") -> None:
        super().__init__(
            f"the answer cannot be read: {why}",
            hint=hint or "Ask again, or ask for plain text: without tools and with reasoning_format 'none'.",
        )
        self.why = why


class WorkspaceError(KvmemError):
    """A workspace, or what was to be read into it, cannot be used this way."""


class WorkspaceClosed(WorkspaceError):
    """The workspace was closed before this call."""

    def __init__(self, what: str = "the workspace is closed", *, hint: str = "Open it again.") -> None:
        super().__init__(what, hint=hint)


class WorkspaceBusy(WorkspaceError):
    """A step is running; a workspace has one writer."""

    def __init__(self, what: str = "the workspace is busy with another step", *, hint: str = "") -> None:
        super().__init__(what, hint=hint or "Wait for the running step, or cancel it, before the next.")


class InputError(WorkspaceError):
    """A text that was to be read is unreadable or is not text; `source` names it."""

    def __init__(self, source: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"cannot read {source}: {why}", hint=hint or "Give a readable text file.")
        self.source = source


class StoreError(WorkspaceError):
    """A durable workspace, or the folder it lies in, cannot be used this way."""


class WorkspaceNotFound(StoreError):
    """No workspace has the name `name`; if `may_exist`, as far as the folder can be read."""

    def __init__(self, name: str, *, hint: str = "", may_exist: bool = False) -> None:
        super().__init__(
            f"there is no workspace named {name!r:.220}",
            hint=hint or "See `kvmem workspace ls` for the names, and --data-dir for the folder they lie in.",
        )
        self.name = name
        self.may_exist = may_exist


class WorkspaceExists(StoreError):
    """A workspace has the name `name` already."""

    def __init__(self, name: str, *, hint: str = "") -> None:
        super().__init__(
            f"a workspace named {name!r:.220} exists already",
            hint=hint or "Choose another name, or delete it.",
        )
        self.name = name


class InvalidName(StoreError):
    """`name` cannot be the name of a workspace."""

    def __init__(self, name: str, why: str, *, hint: str = "") -> None:
        super().__init__(
            f"the name {name!r:.60} cannot be used: {why}",
            hint=hint or "Use 1 to 200 characters of any script, without control characters.",
        )
        self.name = name


class StoreLocked(StoreError):
    """Somebody else writes to the workspace `name`; `holder` says who."""

    def __init__(self, name: str, holder: str, *, hint: str = "") -> None:
        super().__init__(
            f"the workspace {name!r:.220} is in use by {holder}",
            hint=hint or "Close it there, or open it read-only here (--read-only; read_only=True).",
        )
        self.name = name
        self.holder = holder


class WorkspaceMismatch(StoreError):
    """A workspace was made with another model or layout: `what` is `stored` there and `given` now."""

    def __init__(self, what: str, stored: object, given: object, *, hint: str = "") -> None:
        super().__init__(
            f"the workspace does not fit: its {what} is {stored}, given is {given}",
            hint=hint or "Open it with the model and the options it was made with, or make a new workspace.",
        )
        self.stored = stored
        self.given = given


class FormatTooNew(StoreError):
    """`path` has format `found`; this program knows formats up to `known`."""

    def __init__(self, path: str | PathLike[str], found: int, known: int, *, hint: str = "") -> None:
        super().__init__(
            f"{str(path)!r} has format {found}, this version of kvmem_llama knows formats up to {known}",
            hint=hint or "Use a newer version of kvmem_llama; nothing was changed.",
        )
        self.path = str(path)
        self.found = found
        self.known = known


class FormatTooOld(StoreError):
    """`path` has format `found`, which an earlier version wrote; this program reads only `known`."""

    def __init__(self, path: str | PathLike[str], found: int, known: int, *, hint: str = "") -> None:
        super().__init__(
            f"{str(path)!r} has the older format {found}, this version of kvmem_llama reads format {known}",
            hint=hint
            or "Nothing was changed. Export its workspaces with the version that made them and import the "
            "files here, or delete the folder it lies in and read the texts again.",
        )
        self.path = str(path)
        self.found = found
        self.known = known


class StoreFull(StoreError):
    """There is no space for `needed` bytes at `path`, where `free` bytes are left (-1: not known)."""

    def __init__(self, path: str | PathLike[str], needed: int, free: int = -1, *, hint: str = "") -> None:
        left = f", {free} bytes are free" if free >= 0 else ""
        super().__init__(
            f"no space left for {needed} bytes at {str(path)!r}{left}",
            hint=hint or "Free some space, delete workspaces (`kvmem workspace rm`) or set a --disk-budget.",
        )
        self.path = str(path)
        self.needed = needed
        self.free = free


class StoreFailed(StoreError):
    """The operating system refused an operation on `path`; `why` is its reason."""

    def __init__(self, path: str | PathLike[str], why: str, *, hint: str = "") -> None:
        super().__init__(
            f"{str(path)!r}: {why}",
            hint=hint or "What was acknowledged is safe. Check the disk and the folder's permissions.",
        )
        self.path = str(path)
        self.why = why


class StoreDamaged(StoreError):
    """Stored bytes are not the ones that were written."""


class RecordDamaged(StoreDamaged):
    """The record at `where` (a segment and slot, or a block) cannot be read as it was written."""

    def __init__(self, where: str, why: str, *, hint: str = "") -> None:
        super().__init__(
            f"the record at {where} is damaged: {why}",
            hint=hint
            or "Its tokens are safe and it is recomputed when wanted; see `kvmem workspace verify`.",
        )
        self.where = where
        self.why = why
        self.refs: tuple[object, ...] = ()  # of all records that the failed call found damaged


class CatalogDamaged(StoreDamaged):
    """The catalog at `path` contradicts itself or cannot be read."""

    def __init__(self, path: str | PathLike[str], why: str, *, hint: str = "") -> None:
        super().__init__(
            f"the catalog {str(path)!r} is damaged: {why}",
            hint=hint or "Run `kvmem workspace verify`, or import an export of the workspace.",
        )
        self.path = str(path)
        self.why = why


class ExportDamaged(StoreDamaged):
    """The file at `path` is not a whole export of a workspace."""

    def __init__(self, path: str | PathLike[str], why: str, *, hint: str = "") -> None:
        super().__init__(
            f"{str(path)!r} is not a sound export: {why}",
            hint=hint or "Nothing was imported. Copy the file again, or export the workspace again.",
        )
        self.path = str(path)
        self.why = why


class Cancelled(KvmemError):
    """The step was cancelled; the workspace is as the last committed step left it."""

    def __init__(self, what: str = "cancelled", *, hint: str = "") -> None:
        super().__init__(what, hint=hint)


# A class not named here has the code of its nearest named base. 1 is left for defects (any other exception).
EXIT_CODES: Final[dict[type[KvmemError], int]] = {
    InvalidOption: 2,
    InvalidRequest: 2,
    ModelError: 3,
    LibraryError: 4,
    BudgetError: 5,
    EngineError: 6,
    WorkspaceError: 7,
    StoreDamaged: 8,
    Cancelled: 130,
}


def exit_code(error: BaseException) -> int:
    """Exit code of a process that ends with `error`; 1 for anything that is not a KvmemError."""
    for cls in type(error).__mro__:
        if cls in EXIT_CODES:
            return EXIT_CODES[cls]
    return 1

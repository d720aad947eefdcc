"""The tree of errors: total exit codes, and messages that say what to do."""

from __future__ import annotations

import inspect

import pytest

from kvmem_llama import errors
from kvmem_llama.errors import EXIT_CODES, KvmemError, exit_code

ALL = sorted(
    (cls for cls in vars(errors).values() if inspect.isclass(cls) and issubclass(cls, KvmemError)),
    key=lambda cls: cls.__name__,
)
FAMILIES = [cls for cls in ALL if cls.__base__ is KvmemError]
LEAVES = [cls for cls in ALL if not cls.__subclasses__()]

EXAMPLES: dict[str, KvmemError] = {
    "ModelNotFound": errors.ModelNotFound("m.gguf"),
    "ModelCorrupt": errors.ModelCorrupt("m.gguf", "cut short"),
    "ModelUnsupported": errors.ModelUnsupported("gpt2", "positions are learned", hint="Try full_context."),
    "LibraryMissing": errors.LibraryMissing("libllama.so not found"),
    "LibraryMismatch": errors.LibraryMismatch("ABI 1, wanted 2"),
    "KernelsMissing": errors.KernelsMissing("libkvmem_kernels.so not found"),
    "MandatoryTooLarge": errors.MandatoryTooLarge(700, 512),
    "NotOffered": errors.NotOffered("Llama.embed", "its vectors are not kept"),
    "DoesNotFit": errors.DoesNotFit("a view of 8,192 tokens needs 9.0 GB of RAM", hint="These fit: -c 4096."),
    "InvalidOption": errors.InvalidOption("-c", -1, "must be at least 0"),
    "InvalidRequest": errors.InvalidRequest("Field 'tools': must be a list"),
    "DecodeFailed": errors.DecodeFailed(-3),
    "CaptureMismatch": errors.CaptureMismatch(7, 6),
    "HookFailed": errors.HookFailed(-2, "cell 7 is occupied"),
    "EngineClosed": errors.EngineClosed(),
    "TemplateUnsupported": errors.TemplateUnsupported("not known"),
    "OutputMismatch": errors.OutputMismatch("it does not match the expected peg-native format"),
    "WorkspaceClosed": errors.WorkspaceClosed(),
    "WorkspaceBusy": errors.WorkspaceBusy(),
    "InputError": errors.InputError("notes.bin", "it is binary"),
    "WorkspaceNotFound": errors.WorkspaceNotFound("notes"),
    "WorkspaceExists": errors.WorkspaceExists("notes"),
    "InvalidName": errors.InvalidName("a\nb", "it holds a control character"),
    "StoreLocked": errors.StoreLocked("notes", "process 7 on host h"),
    "WorkspaceMismatch": errors.WorkspaceMismatch("block size", 32, 16),
    "FormatTooNew": errors.FormatTooNew("catalog.sqlite", 2, 1),
    "FormatTooOld": errors.FormatTooOld("catalog.sqlite", 1, 2),
    "StoreFull": errors.StoreFull("segments", 4096, 12),
    "StoreFailed": errors.StoreFailed("segments", "Input/output error"),
    "RecordDamaged": errors.RecordDamaged("segment 1, slot 2", "its checksum differs"),
    "CatalogDamaged": errors.CatalogDamaged("catalog.sqlite", "block 7 is missing"),
    "ExportDamaged": errors.ExportDamaged("notes.kvmem", "it ends early"),
    "Cancelled": errors.Cancelled(),
}


def test_every_error_has_an_exit_code_of_its_own_family() -> None:
    for cls in ALL:
        if cls is KvmemError:
            continue
        assert any(base in EXIT_CODES for base in cls.__mro__), f"{cls.__name__} has no exit code"
    assert all(family in EXIT_CODES for family in FAMILIES)
    assert all(code not in (0, 1) for code in EXIT_CODES.values())


def test_every_leaf_of_the_tree_has_an_example_here() -> None:
    assert {cls.__name__ for cls in LEAVES} == set(EXAMPLES)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("InvalidOption", 2),
        ("ModelCorrupt", 3),
        ("LibraryMismatch", 4),
        ("MandatoryTooLarge", 5),
        ("DecodeFailed", 6),
        ("InputError", 7),
        ("StoreLocked", 7),
        ("StoreFull", 7),
        ("RecordDamaged", 8),
        ("CatalogDamaged", 8),
        ("Cancelled", 130),
    ],
)
def test_exit_codes_are_the_documented_ones(name: str, code: int) -> None:
    assert exit_code(EXAMPLES[name]) == code


def test_a_defect_has_exit_code_one() -> None:
    assert exit_code(ZeroDivisionError()) == 1


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_messages_are_one_line_say_what_happened_and_what_to_do(name: str) -> None:
    error = EXAMPLES[name]
    assert error.what and not error.what.endswith(".")
    assert "\n" not in str(error)
    assert str(error).startswith(error.what)
    if name != "Cancelled":
        assert error.hint.endswith((".", "!")) and error.hint in str(error)


def test_a_long_or_broken_name_makes_no_long_or_broken_message() -> None:
    for error in (
        errors.WorkspaceNotFound("x" * 5000),
        errors.InvalidName("\x00\n" * 500, "why"),
        errors.StoreLocked("\n" * 300, "h"),
    ):
        assert len(str(error)) < 600 and "\n" not in str(error)


def test_the_numbers_of_an_error_are_attributes_and_in_its_text() -> None:
    error = errors.MandatoryTooLarge(n_needed=700, n_view=512)
    assert (error.n_needed, error.n_view) == (700, 512)
    assert "700" in str(error) and "512" in str(error)

"""The build's source: fetched once, verified, patched exactly, and every failure said in one line."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).resolve().parents[2]

PATCH = """\
Purpose: a header before the first diff, with a line that looks like one:
--- a/src/nothing.cpp

diff --git a/src/a.cpp b/src/a.cpp
--- a/src/a.cpp
+++ b/src/a.cpp
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
"""

NEW_FILE = """\
diff --git a/src/new.cpp b/src/new.cpp
new file mode 100644
--- /dev/null
+++ b/src/new.cpp
@@ -0,0 +1 @@
+new
"""

# The archive's build hook leaves a file behind when it runs.
BACKEND = """\
import pathlib
def build_sdist(*a, **k): raise NotImplementedError
def build_wheel(*a, **k): raise NotImplementedError
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    pathlib.Path({marker!r}).touch()
    info = pathlib.Path(folder, "tiny_binding-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-binding\\nVersion: 1.0\\n")
    return info.name
"""


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_prepare", REPO / "vendor" / "prepare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


vendor = _load()


class Tree:
    """A tiny source archive on a package index that is a folder, with a patch folder and a build folder."""

    def __init__(self, folder: Path) -> None:
        self.index = folder / "index"
        self.cache = folder / "cache"
        self.patches = folder / "patches"
        self.build = folder / "vendor" / "build"
        self.marker = folder / "build-hook-ran"
        self.index.mkdir()
        self.patches.mkdir()
        content = self.publish("three")
        self.pin = vendor.Pin(
            package="tiny-binding",
            version="1.0",
            sdist="tiny_binding-1.0.tar.gz",
            sha256=hashlib.sha256(content).hexdigest(),
            llama_cpp_commit="0" * 40,
        )

    def publish(self, last_line: str) -> bytes:
        """Put an archive on the index; returns its bytes."""
        toml = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        toml += '[project]\nname = "tiny-binding"\nversion = "1.0"\n'
        files = {
            "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-binding\nVersion: 1.0\n",
            "pyproject.toml": toml,
            "backend.py": BACKEND.format(marker=str(self.marker)),
            "LICENSE.md": "free",
            "llama_cpp/__init__.py": "",
            "docs/unwanted.md": "",
            "vendor/llama.cpp/CMakeLists.txt": "project(x)\n",
            "vendor/llama.cpp/src/a.cpp": f"one\ntwo\n{last_line}\n",
            "vendor/llama.cpp/src/b.cpp": "b\n",
        }
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(f"tiny_binding-1.0/{name}")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
        (self.index / "tiny_binding-1.0.tar.gz").write_bytes(raw.getvalue())
        return raw.getvalue()

    def prepare(self, *, stock_only: bool = False) -> str:
        identity: str = vendor.prepare(self.pin, self.patches, self.build, self.cache, stock_only=stock_only)
        return identity

    @property
    def patched(self) -> Path:
        return self.build / "patched" / "llama.cpp"

    @property
    def stock(self) -> Path:
        return self.build / "stock" / "llama.cpp"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tree.index))
    return tree


@pytest.fixture
def cached(tree: Tree) -> Tree:
    """The archive lies in the cache: no test on patches pays for pip."""
    tree.cache.mkdir()
    (tree.index / tree.pin.sdist).rename(tree.cache / tree.pin.sdist)
    return tree


def test_pip_fetches_the_archive_once(tree: Tree) -> None:
    tree.prepare()
    (tree.index / tree.pin.sdist).unlink()
    for left in ("stock", "patched", "stock.sha256", "patched.json"):
        assert (tree.build / left).exists()
    (tree.build / "stock.sha256").unlink()  # as in another checkout
    tree.prepare()
    assert (tree.build / "stock" / "LICENSE.md").read_text() == "free"
    assert (tree.build / "stock" / "llama_cpp" / "__init__.py").is_file()
    assert not (tree.build / "stock" / "docs").exists()


def test_an_index_that_serves_another_archive_is_refused_before_its_code_runs(tree: Tree) -> None:
    tree.publish("tampered")
    with pytest.raises(vendor.VendorError, match=r"not the pinned archive.*sha256.*by hand"):
        tree.prepare()
    assert not tree.marker.exists()
    assert not tree.stock.exists()


def test_no_network_says_what_is_missing_and_where_to_put_it(tree: Tree) -> None:
    (tree.index / tree.pin.sdist).unlink()
    with pytest.raises(
        vendor.VendorError, match=r"cannot fetch tiny_binding-1\.0\.tar\.gz: ERROR.*network"
    ) as e:
        tree.prepare()
    assert str(tree.cache) in str(e.value)


def test_a_tampered_archive_in_the_cache_is_refused_with_both_checksums(cached: Tree) -> None:
    archive = cached.cache / cached.pin.sdist
    archive.write_bytes(archive.read_bytes()[:-1] + b"x")
    with pytest.raises(vendor.VendorError, match=r"expected " + cached.pin.sha256) as e:
        cached.prepare()
    assert hashlib.sha256(archive.read_bytes()).hexdigest() in str(e.value)
    assert str(archive) in str(e.value)
    assert "\n" not in str(e.value)


def test_patches_and_plain_files_go_to_the_patched_tree_only(cached: Tree) -> None:
    (cached.patches / "0001-two.patch").write_text(PATCH)
    (cached.patches / "0002-new.patch").write_text(NEW_FILE)
    (cached.patches / "hooks.cpp").write_text("hooks\n")
    identity = cached.prepare()
    assert (cached.patched / "src/a.cpp").read_text() == "one\nTWO\nthree\n"
    assert (cached.patched / "src/new.cpp").read_text() == "new\n"
    assert (cached.patched / "src/hooks.cpp").read_text() == "hooks\n"
    assert (cached.build / "patch_id.txt").read_text().strip() == identity
    assert (cached.stock / "src/a.cpp").read_text() == "one\ntwo\nthree\n"
    assert not (cached.stock / "src/hooks.cpp").exists()


def test_patches_apply_inside_a_git_work_tree(cached: Tree) -> None:
    subprocess.run(["git", "init", "--quiet", str(cached.patches.parent)], check=True)
    (cached.patches / "0001-two.patch").write_text(PATCH)
    cached.prepare()
    assert (cached.patched / "src/a.cpp").read_text() == "one\nTWO\nthree\n"


def test_a_failed_patch_names_the_patch_and_the_file_and_changes_nothing(cached: Tree) -> None:
    patch = cached.patches / "0001-two.patch"
    patch.write_text(PATCH)
    before = cached.prepare()
    patch.write_text(PATCH.replace("-two", "-zwei"))
    with pytest.raises(vendor.VendorError, match=r"0001-two\.patch does not apply.*src/a\.cpp") as e:
        cached.prepare()
    assert "\n" not in str(e.value)
    patch.write_text(PATCH)
    assert cached.prepare() == before
    assert (cached.patched / "src/a.cpp").read_text() == "one\nTWO\nthree\n"


def test_only_files_whose_content_changes_are_written_again(cached: Tree) -> None:
    patch = cached.patches / "0001-two.patch"
    patch.write_text(PATCH)
    (cached.patches / "hooks.cpp").write_text("hooks\n")
    first = cached.prepare()
    times = {p: p.stat().st_mtime_ns for p in cached.patched.rglob("*.*")}
    assert cached.prepare() == first
    (cached.patches / "hooks.cpp").write_text("more hooks\n")
    assert cached.prepare() != first
    changed = [p.name for p in cached.patched.rglob("*.*") if p.stat().st_mtime_ns != times[p]]
    assert changed == ["hooks.cpp"]


def test_what_a_removed_patch_changed_or_added_goes_back_to_stock(cached: Tree) -> None:
    for name, text in (("0001-two.patch", PATCH), ("0002-new.patch", NEW_FILE), ("hooks.cpp", "hooks\n")):
        (cached.patches / name).write_text(text)
    cached.prepare()
    for file in cached.patches.iterdir():
        file.unlink()
    cached.prepare()
    names = [p.relative_to(cached.patched).as_posix() for p in cached.patched.rglob("*") if p.is_file()]
    assert sorted(names) == ["CMakeLists.txt", "src/a.cpp", "src/b.cpp"]
    assert (cached.patched / "src/a.cpp").read_text() == "one\ntwo\nthree\n"


def test_an_interrupted_patching_is_finished_by_the_next_run(
    cached: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cached.prepare()
    (cached.patches / "0001-two.patch").write_text(PATCH)
    (cached.patches / "hooks.cpp").write_text("hooks\n")
    copy = vendor.shutil.copyfile

    def stop_in_the_patched_tree(source: Path, goal: Path) -> object:
        if Path(goal) == cached.patched / "src" / "hooks.cpp":
            raise KeyboardInterrupt
        return copy(source, goal)

    with monkeypatch.context() as patcher, pytest.raises(KeyboardInterrupt):
        patcher.setattr(vendor.shutil, "copyfile", stop_in_the_patched_tree)
        cached.prepare()
    assert (cached.patched / "src/a.cpp").read_text() == "one\nTWO\nthree\n"
    for file in cached.patches.iterdir():
        file.unlink()
    assert cached.prepare() == before
    assert (cached.patched / "src/a.cpp").read_text() == "one\ntwo\nthree\n"


def test_the_stock_tree_is_made_without_the_patches(cached: Tree) -> None:
    (cached.patches / "0001-two.patch").write_text("this applies to nothing")
    cached.prepare(stock_only=True)
    assert (cached.stock / "src/a.cpp").is_file()
    assert not cached.patched.exists()


def test_the_script_ends_with_one_line_and_status_1(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    for name in ("prepare.py", "pin.toml"):
        (tmp_path / "vendor" / name).write_text((REPO / "vendor" / name).read_text())
    cache = tmp_path / "cache" / "vendor"
    cache.mkdir(parents=True)
    (cache / "llama_cpp_python-0.3.36.tar.gz").write_text("not an archive")
    environment = {"KVMEM_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    script = tmp_path / "vendor" / "prepare.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("kvmem_llama: ") and done.stderr.count("\n") == 1
    assert "is not the pinned archive" in done.stderr


def test_our_patches_have_a_purpose_and_change_at_most_150_lines_of_existing_files() -> None:
    patch_set = vendor.PatchSet.read(REPO / "patches")
    assert patch_set.patches
    changed = 0
    for patch in patch_set.patches:
        header, diff, body = f"\n{patch.read_text()}".partition("\ndiff ")
        assert diff and "Purpose:" in header, f"{patch.name} has no header with a purpose"
        assert "--- /dev/null" not in body, f"{patch.name}: new files lie beside the patches as plain files"
        changed += len(re.findall(r"^[+-](?!--|\+\+)", body, re.MULTILINE))
    assert 0 < changed <= 150

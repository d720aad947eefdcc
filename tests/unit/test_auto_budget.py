"""Which histories go when those that no client has named take too much disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from durable_run import Memory, make_memory, make_root

from kvmem_llama.server.auto_budget import families_to_delete
from kvmem_llama.store.root import Root

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return make_root(tmp_path)


def auto(number: int) -> str:
    """The name of a history that no client has named."""
    return f"auto-20260101-000000-{number:06x}"


def add(root: Root, name: str, *, mib: int = 8, forks: tuple[str, ...] = ()) -> None:
    """A history with forks in a family of at least this size on disk."""
    memory = make_memory(root, name)
    memory.step(range(20))
    for fork in forks:
        memory.fork(fork).close()
    memory.close()
    family = root.folder / root.find(name).family
    (family / "segments" / "more").write_bytes(bytes(mib * MIB))


def going(root: Root, mib: int) -> list[set[str]]:
    return [set(family.names) for family in families_to_delete(root, mib * MIB)]


def test_those_used_longest_ago_go_and_the_newest_stays(root: Root) -> None:
    for number in range(4):
        add(root, auto(number))
    assert going(root, 100) == []
    assert going(root, 20) == [{auto(1)}, {auto(0)}]
    assert going(root, 1) == [{auto(2)}, {auto(1)}, {auto(0)}]
    memory = Memory(root, root.find(auto(0)))
    memory.step([7])  # it is used again
    memory.close()
    assert going(root, 20) == [{auto(2)}, {auto(1)}]


def test_a_family_goes_as_a_whole_and_stays_for_a_name_that_a_client_gave(root: Root) -> None:
    add(root, auto(0), forks=(auto(1),))
    add(root, auto(2), forks=("mine",))
    add(root, "notes", mib=100)
    add(root, "auto-repair manual", mib=100)
    add(root, auto(3))
    assert going(root, 1) == [{auto(0), auto(1)}]


def test_a_family_that_cannot_be_read_stays(root: Root) -> None:
    for number in range(3):
        add(root, auto(number))
    catalog = root.folder / root.find(auto(0)).family / "catalog.sqlite"
    assert catalog.exists()
    catalog.write_bytes(b"no catalog" * 1000)
    assert going(root, 1) == [{auto(1)}]


def test_what_was_used_or_forked_since_is_no_longer_as_it_was_looked_at(root: Root) -> None:
    for number in range(4):
        add(root, auto(number))
    two, one, zero = families_to_delete(root, 1)
    Memory(root, root.find(auto(1))).close()  # opened for writing
    memory = Memory(root, root.find(auto(0)))
    memory.fork("mine").close()
    memory.close()
    assert two.is_unchanged(root) and not zero.is_unchanged(root)
    memory = Memory(root, root.find(auto(1)))
    memory.step([7])
    memory.close()
    assert not one.is_unchanged(root)

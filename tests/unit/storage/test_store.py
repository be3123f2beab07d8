"""What every store keeps to: a directory, and one that has no more than an object store has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_files_and_journal import head, record

from anabranch.errors import StorageError
from anabranch.sim.store import SimStore
from anabranch.storage.journal import Journal
from anabranch.storage.local import LocalStore
from anabranch.storage.store import Store

STORES: dict[str, Callable[[Path], Store]] = {
    "a directory": lambda path: LocalStore(path / "store"),
    "one that appends": lambda _: SimStore(appends=True),
    "an object store": lambda _: SimStore(appends=False),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path)


def test_a_name_is_created_once(store: Store) -> None:
    assert store.read("a/b") is None
    assert not store.has("a/b")
    assert store.create("a/b", [b"fi", b"rst"]) == 5
    assert store.create("a/b", [b"second"]) is None
    assert store.read("a/b") == b"first"
    assert store.has("a/b")
    with store.opened("a/b") as file:
        assert (file.read(2), file.read()) == (b"fi", b"rst")


def test_what_is_put_takes_the_place_of_what_was_there(store: Store) -> None:
    assert store.put("a", [b"one"]) == 3
    assert store.put("a", [b"an", b"other"], sync=False, unhurried=True) == 7
    assert store.read("a") == b"another"
    assert store.names("") == ["a"]


def test_names_are_listed_level_by_level(store: Store) -> None:
    for name in ("a/1/x", "a/1/y", "a/2", "b"):
        store.create(name, [b"."])
    assert sorted(store.names("")) == ["a", "b"]
    assert sorted(store.names("a")) == ["1", "2"]
    assert sorted(store.names("a/1")) == ["x", "y"]
    assert store.names("a/3") == store.names("b") == []


def test_a_name_goes_with_all_below_it(store: Store) -> None:
    for name in ("a/1/x", "a/1/y", "a/2"):
        store.create(name, [b"."])
    store.delete("a/1")
    store.delete("a/1")
    assert store.names("a") == ["2"]
    assert store.read("a/1/x") is None
    assert store.create("a/1/x", [b"again"]) == 5


def test_what_is_not_there_is_refused_where_it_is_opened(store: Store) -> None:
    with pytest.raises(StorageError, match=r"cannot read .*a/b"), store.opened("a/b"):
        pass


def test_what_is_hidden_appears_once(store: Store) -> None:
    store.create("a/.hidden", [b"mine"])
    store.reveal("a/.hidden", "a/shown")
    assert store.read("a/shown") == b"mine"
    assert store.names("a") == ["shown"]
    store.reveal("a/.hidden", "a/shown")  # somebody else was at it
    store.create("a/.another", [b"another"])
    store.reveal("a/.another", "a/shown")
    assert store.read("a/shown") == b"mine"
    assert store.names("a") == ["shown"]
    with pytest.raises(StorageError):
        store.reveal("a/.gone", "a/never")


def test_a_name_grows_in_order_and_goes_as_a_whole(store: Store) -> None:
    assert store.read_grown("a") is None
    store.create("a", [b"0;"])
    growing = store.grow("a")
    for n in range(1, 12):  # by number, not by text
        growing.add(b"%d;" % n)
    growing.close()
    assert store.read_grown("a") == b"".join(b"%d;" % n for n in range(12))
    assert store.names("") == ["a"]
    store.delete("a")
    assert store.read_grown("a") is None
    assert store.names("") == []


def test_a_second_writer_of_a_created_part_is_refused() -> None:
    store = SimStore(appends=False)
    store.create("a", [b"0"])
    first, second = store.grow("a"), store.grow("a")
    first.add(b"1")
    with pytest.raises(StorageError, match="somebody else has written a/1"):
        second.add(b"other")


def test_a_journal_is_the_same_on_all_of_them(store: Store) -> None:
    book = Journal(store)
    assert book.read() is None
    for number in range(4, 8):
        book.begin(head(record(number)))
    book.append(record(8))
    book.close()
    assert sorted(store.names("journal")) == ["4-3.jsonl", "4-4.jsonl"]
    assert Journal(store).read() == (head(record(7)), [record(8)])
    with pytest.raises(StorageError, match="is there already"):
        Journal(store).begin(head())  # the names of this generation begin anew: it is 4-1 …
        Journal(store).begin(head())  # … and here it is there

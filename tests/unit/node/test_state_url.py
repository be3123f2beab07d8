"""State on an object store: restarts, losses, trimming and damage are as on a local disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import local_run
import pytest
from local_run import LocalRun
from test_local_runs import Comparison, _simple
from test_restarts import batch

import anabranch as ab
from anabranch.errors import ConfigError, StorageError
from anabranch.storage import checkpoint_store
from anabranch.storage.checkpoint_files import read_checkpoint
from anabranch.storage.checkpoint_store import LOCAL, check_url
from anabranch.storage.identity import identify
from anabranch.storage.local import LocalStore
from anabranch.storage.store import Store
from anabranch.upgrade.state_reader import inspect

fsspec = pytest.importorskip("fsspec")
MEMORY = "memory://jobs/one"


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    yield MEMORY
    fsspec.filesystem("memory").store.clear()


def fed(
    comparison: Comparison, root: Path, url: str | None, batches: range, interval: str = "1ms"
) -> LocalRun:
    run = LocalRun(comparison.topology(), root, checkpoint_interval=interval, state_url=url)
    for n in batches:
        comparison.feed(run, batch(n))
        run.await_cut()
    return run


def stored(root: Path, url: str) -> list[str]:
    """The job's own files."""
    return checkpoint_store.names(LocalStore(root), f"{url}/{identify(LocalStore(root)).job}")


def test_two_jobs_with_one_url_keep_their_state_apart(tmp_path: Path, url: str) -> None:
    """Files of the same chain, partition, slice and epoch: before, the later job's were read."""
    jobs = [Comparison(_simple()), Comparison(_simple())]
    for first in (0, 2):
        for number, comparison in enumerate(jobs):
            rows = range(first + 100 * number, first + 100 * number + 2)
            fed(comparison, tmp_path / str(number), url, rows).stop()
    one, two = (
        {n.split("/", n.count("/") - 2)[-1] for n in stored(tmp_path / d, url)} for d in "01"
    )
    assert one & two


def test_files_of_a_store_from_before_are_still_read(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie right below the URL."""
    comparison, root, real = Comparison(_simple()), tmp_path / "job", local_run.prepare

    def before(*args: Any) -> Any:
        prepared = real(*args)
        return replace(prepared, spec=replace(prepared.spec, checkpoints=url))

    with monkeypatch.context() as patch:
        patch.setattr(local_run, "prepare", before)
        fed(comparison, root, url, range(3)).stop()
    assert checkpoint_store.names(LocalStore(root), url)
    assert not stored(root, url)
    fed(comparison, root, url, range(3, 5)).stop()
    assert stored(root, url)


def test_restarts_and_trimming(tmp_path: Path, url: str) -> None:
    comparison = Comparison(_simple())
    root = tmp_path / "job"
    fed(comparison, root, url, range(6)).stop()
    assert not (root / LOCAL).exists()
    names = stored(root, url)
    assert names
    assert all(n.startswith(url + "/") for n in names)
    cut = inspect(root).operators  # the state reader finds them, too
    assert sum(o.rows for o in cut) > 0
    fed(comparison, root, url, range(6, 9)).kill()
    fed(comparison, root, url, range(9, 30)).stop()
    slices = {n.rpartition("/")[2].partition("-")[0] for n in stored(root, url)}
    assert len(slices) < 15  # of thirty that were sealed


@pytest.mark.parametrize("behind", [False, True])
def test_what_cannot_be_deleted_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, behind: bool
) -> None:
    deleted: list[str] = []
    real = checkpoint_store.delete

    def delete(store: Store, name: str) -> None:
        deleted.append(name)
        if len(deleted) < 4 or name == deleted[0]:
            raise StorageError("the store is not there")
        real(store, name)

    monkeypatch.setattr(checkpoint_store, "delete", delete)
    comparison = Comparison(_simple())
    root = tmp_path / "job"
    stranger = root / LOCAL / "a" / "b" / "mine.ckpt"
    stranger.parent.mkdir(parents=True)
    stranger.touch()
    run = LocalRun(comparison.topology(), root, checkpoint_interval="1ms", behind=behind)
    for n in range(30):
        comparison.feed(run, batch(n))
        run.await_cut()
    run.stop()  # waits for what is being deleted
    assert "could not be deleted yet: the store is not there" in caplog.text
    assert len(set(deleted)) < len(deleted)
    left = set(checkpoint_store.names(LocalStore(root), LOCAL))
    assert left & set(deleted) == {deleted[0]}  # for ever, and it does not keep the others
    assert stranger.exists()
    assert len({name.rpartition("/")[2] for name in left}) < 15


def test_a_job_moves_to_a_store_and_back(tmp_path: Path, url: str) -> None:
    comparison = Comparison(_simple())
    for number, place in enumerate((None, url, None)):
        fed(comparison, tmp_path / "job", place, range(3 * number, 3 * number + 3)).stop()


def test_a_damaged_newest_file_is_skipped(tmp_path: Path, url: str) -> None:
    comparison = Comparison(_simple())
    root = tmp_path / "job"
    fed(comparison, root, url, range(5)).kill()
    names = sorted(stored(root, url), key=lambda n: n.rpartition("/")[2])
    system, path = fsspec.core.url_to_fs(names[-1])
    system.pipe_file(path, system.cat_file(path)[:-3])
    fed(comparison, root, url, range(5, 7)).stop()


def test_what_the_store_refuses_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("the bucket is closed")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "_open", full)
    with pytest.raises(StorageError, match=r"cannot write memory://jobs.*the bucket is closed"):
        fed(Comparison(_simple()), tmp_path, MEMORY, range(5)).stop()


@pytest.mark.parametrize(
    ("url", "why"), [("a/directory", "give a URL"), ("nosuch://x", "install fsspec")]
)
def test_places_that_are_none_are_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_url(url)
    topology = ab.Topology("t")
    topology.source("s", None).to("o", ab.Memory())
    with pytest.raises(ConfigError, match=why):
        topology.start(None, checkpoint="ck", state_url=url)  # type: ignore[arg-type]


def test_a_store_that_cannot_be_opened_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    """It is a ValueError that fsspec raises, as damage does."""
    with pytest.raises(StorageError, match=r"cannot read nosuch://x.*check the store"):
        read_checkpoint(LocalStore(tmp_path), "nosuch://x/count/0/000000000001-1.ckpt")

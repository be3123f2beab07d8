"""No part of a password is shown or written down, however an address is malformed."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.node.local_run import LocalRun

import anabranch as ab
from anabranch.cli.describe import draw
from anabranch.errors import AnabranchError, ConfigError, StorageError
from anabranch.sinks import Home
from anabranch.storage import checkpoint_store
from anabranch.storage.checkpoint_files import read_checkpoint
from anabranch.storage.checkpoint_store import check_url
from anabranch.storage.credentials import masked
from anabranch.storage.files import directory
from anabranch.storage.local import LocalStore
from postgres_server import Server

SECRET = "hUnter2"


def everything(error: BaseException) -> str:
    """All that anybody prints of an error: its text, its fields, its trace with causes."""
    trace = "".join(traceback.format_exception(error))
    fields = error.fields if isinstance(error, AnabranchError) else {}
    return f"{error} {error!r} {fields!r} {trace} {pickle.loads(pickle.dumps(error))!r}"


def without_this_file(text: str) -> str:
    """A trace quotes the lines of the test, which has the addresses."""
    return "\n".join(line for line in text.split("\n") if SECRET not in line or "ab." not in line)


# -- PostgreSQL --------------------------------------------------------------------------------

MALFORMED = [
    f"postgresql://user:{SECRET}@x@localhost/db",
    f"postgresql://user:x@{SECRET}@localhost/db",
    f"postgresql://user:{SECRET}/x@localhost/db",
    f"postgresql://user:x/{SECRET}@localhost/db",
    f"postgresql://user:a?{SECRET}@x@localhost/db",
    f"postgresql://user:x:{SECRET}@localhost/db",
    f"postgresql://user:%zz{SECRET}@localhost/db",
    f"postgresql://user:a {SECRET}@localhost/db",
    f"postgresql://user:{SECRET}",
    f"postgresql://user:{SECRET}:5432/db",
    f"postgresql://user:{SECRET}@[::1/db",
    f"postgresql://localhost/db?password{SECRET}",
    f"postgresql://localhost/db?pasword={SECRET}",
    f"postgres//user:{SECRET}@localhost/db",
    f"http://user:{SECRET}@localhost/db",
    f"user:{SECRET}@localhost/db",
    f"host=localhost password=a {SECRET} user=me",
    f"host=localhost password='{SECRET} user=me",
    f"host=localhost pasword={SECRET}",
    f"host=localhost port={SECRET}",
    f"host=user:{SECRET}@localhost",
    f"dbname=postgresql://user:{SECRET}@localhost/db",
    f"password={SECRET} = host",
    f"host=localhost\0password={SECRET}",
]


@pytest.mark.parametrize("address", MALFORMED)
def test_a_malformed_address_of_postgres_is_refused_without_a_word_of_it(
    address: str, tmp_path: Path
) -> None:
    sink = ab.Postgres(address, "t")
    sink.bind(Home("job", "out", tmp_path))
    topology = ab.Topology("t")
    topology.source("s", None).to("out", sink)
    with pytest.raises(ConfigError, match="it is not shown") as refusal:
        LocalRun(topology, tmp_path)
    assert SECRET not in without_this_file(everything(refusal.value)) + repr(sink)
    assert "localhost" not in refusal.value.message


@pytest.mark.parametrize(
    "address",
    [
        f"postgresql://me:{SECRET}@127.0.0.1:1/db?connect_timeout=1",
        f"postgresql://me@127.0.0.1:1/db?password={SECRET}",
        f"postgresql://me:a?{SECRET}@127.0.0.1:1/db",
        f"host=127.0.0.1 port=1 user=me password='{SECRET}'",
        f"host=@nosuch password={SECRET} application_name=a@b",
    ],
)
def test_a_server_that_is_not_there_is_told_without_the_password(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sink = ab.Postgres(address, "t")
    topology = ab.Topology("t")
    topology.source("s", None).to("out", sink)
    with pytest.raises(StorageError, match="could not reach the PostgreSQL table t") as refusal:
        LocalRun(topology, tmp_path)
    assert SECRET not in without_this_file(everything(refusal.value)) + caplog.text
    assert SECRET.encode() not in pickle.dumps(sink)


def test_a_run_writes_no_password_anywhere(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Journal, notes, dead letters, status, description, logs and what nodes get."""
    caplog.set_level(logging.DEBUG)
    server.query("CREATE TABLE secret (k bigint, v bigint CHECK (v < 7))")
    topology = ab.Topology("t")
    rows = topology.source("s", None)
    address = f"{server.address} password={SECRET}"
    rows.to("out", ab.Postgres(address, "secret"), on_error="dead_letter")
    rows.to("fun", ab.ForEachSlice(functools.partial(_ignore, SECRET), arrow=True))
    topology.dead_letters("dead", ab.Parquet(str(tmp_path / "dead")))
    run = LocalRun(topology, tmp_path / "ck")
    run.feed([{"s": [(1, 1), (2, 9)]}])
    shown = [repr(topology), repr(topology._sinks), repr(topology.plan()), ab.describe(topology)]
    shown.append(draw(topology.plan()))
    shown += [repr(run.run.status()), repr(run.history.totals), caplog.text]
    run.stop()
    assert server.query("SELECT k FROM secret") == [(1,)]
    assert SECRET not in " ".join(shown)
    assert SECRET.encode() not in run.run.caller.spec
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 5
    assert [p for p in files if SECRET.encode() in p.read_bytes()] == []


def _ignore(password: str, rows: Any, slice_no: int) -> None:
    pass


# -- URLs --------------------------------------------------------------------------------------

URLS = [
    f"s3://key:{SECRET}@bucket/job",
    f"s3://key%3A{SECRET}@bucket/job",
    f"gs://bucket/job#token={SECRET}@1",
    f"s3://key:a/{SECRET}@bucket/job",
    f"s3://key:a?{SECRET}@bucket/job",
    f"s3://key:{SECRET}@x@bucket/job",
    f"s3://key:a://{SECRET}@bucket/job",
    f"s3://:{SECRET}@bucket",
    f"simplecache::s3://key:{SECRET}@bucket/job",
    f"ftp://user:{SECRET}@host:21/job",
    f"abfss://container@account/job?sig={SECRET}",
    f"https://host/job?X-Amz-Signature={SECRET}&x=1",
    f"s3://bucket/job?aws_secret_access_key={SECRET}@1",
    f"s3://bucket/job?x=1&token={SECRET}",
]


def _start(url: str) -> None:
    topology = ab.Topology("t")
    topology.source("s", None).to("o", ab.Memory())
    topology.start(None, checkpoint="nowhere", state_url=url)  # type: ignore[arg-type]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("take", [check_url, _start, ab.Delta], ids=["check", "start", "delta"])
def test_a_url_with_credentials_is_refused_without_them(
    take: Callable[[str], Any], url: str
) -> None:
    with pytest.raises(ConfigError, match="leave it out and") as refusal:
        take(url)
    assert SECRET not in everything(refusal.value)


@pytest.mark.parametrize("url", URLS)
def test_a_directory_is_no_url_and_shows_none(url: str) -> None:
    """A URL, also one that a Path has made one slash of two in."""
    for given in (url, Path(url)):
        with pytest.raises(ConfigError, match="has to be a directory") as refusal:
            directory(given, "checkpoint")
        assert SECRET not in everything(refusal.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket/a@b", "sftp://user@host/x", "hdfs://host:8020/user@x", "memory://a/b:c@d"]
)
def test_urls_without_credentials_are_taken(url: str) -> None:
    assert ab.Delta(url).path == url


def test_what_is_no_url_is_shown_without_what_may_be_a_password() -> None:
    with pytest.raises(ConfigError, match=r"state_url is '\*\*\*@bucket'") as refusal:
        check_url(f"key:{SECRET}@bucket")
    assert SECRET not in everything(refusal.value)


def test_names_in_an_old_journal_are_shown_without_their_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The version before took such a URL; its files are still read, if they are there."""
    name = f"nosuch://key:{SECRET}@bucket/count/0/000000000001-1.ckpt"
    store = LocalStore(tmp_path)
    calls = itertools.chain(
        [lambda: read_checkpoint(store, name), lambda: checkpoint_store.delete(store, name)],
        [lambda: checkpoint_store.names(store, name)],
        [lambda: checkpoint_store.write(store, name, [])],
    )
    for call in calls:
        with pytest.raises(StorageError, match=r"nosuch://\*\*\*@bucket") as refusal:
            call()
        assert SECRET not in everything(refusal.value)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("s3://bucket/job", "s3://bucket/job"),
        ("s3://a:b@bucket/job", "s3://***@bucket/job"),
        ("s3://a:b@c@bucket/job", "s3://***@bucket/job"),
        ("s3://bucket/job?sig=x", "s3://bucket/job?***"),
        ("s3://bucket/job?sig=x@y", "s3://***"),
        ("a:b@c", "***@c"),
        ("plain", "plain"),
    ],
)
def test_what_is_shown_of_an_address(address: str, shown: str) -> None:
    assert masked(address) == shown

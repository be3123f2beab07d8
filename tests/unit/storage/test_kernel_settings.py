"""Every kernel with state comes back from its JSON form as it was."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

import anabranch as ab
from anabranch.model.graph import Kind
from anabranch.upgrade.kernel_settings import decode, decode_schema, encode, encode_schema


def kernels() -> dict[str, Any]:
    """One of every stateful operator that a user can write, with and without options."""
    topology = ab.Topology("t")
    keyed = topology.source("s", None, time="t").key_by("k", "l")
    aggregates = {
        "a": ab.count(),
        "b": ab.sum("v"),
        "c": ab.mean("v"),
        "d": ab.min("v"),
        "e": ab.max("v"),
        "f": ab.count_distinct("v"),
        "g": ab.count("v"),
    }
    keyed.aggregate("running", **aggregates)
    keyed.aggregate("forgetful", ttl="2h", time="t", n=ab.count())
    hopping = keyed.window(ab.hopping("30s", "10s"), time="t", lateness="5s")
    left = hopping.aggregate("left", **aggregates)
    right = keyed.window(ab.tumbling("30s"), time="t").aggregate("right", m=ab.count())
    keyed.window(ab.session("1m"), time="t").aggregate("sessions", n=ab.sum("v"))
    keyed.deduplicate("once")
    keyed.deduplicate("again", within="1m", time="t")
    keyed.top_k("best", 3, by="v", descending=False)
    joined = left.key_by("k", "l").join_windows(
        "join", right.key_by("k", "l"), left=["a"], right=["m"], retain="2m"
    )
    joined.to("o", ab.Memory())
    return {o.name: o.kernel for o in topology._operators if o.kind is Kind.KEYED}


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_comes_back(name: str) -> None:
    kernel = kernels()[name]
    assert decode(json.loads(json.dumps(encode(kernel)))) == kernel


def test_what_has_no_form_is_opaque() -> None:
    assert encode({"f": lambda: 1}) == {"class": "dict", "items": [["f", {"class": "opaque"}]]}
    assert decode(encode({"f": object()})) == {"f": None}


@pytest.mark.parametrize(
    "name",
    ["aggregates.Nothing", "nowhere.Count", "canonical.canonical", "hashing.np", "os.system"],
)
def test_a_checkpoint_names_kernels_and_nothing_else(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no .* in this version|is no kernel"):
        decode({"class": name})


def test_schemas_come_back() -> None:
    schema = pa.schema([("k", pa.timestamp("us", "UTC")), ("v", pa.list_(pa.float32()))])
    assert decode_schema(encode_schema(schema)) == schema

"""Small files that a run leaves beside its journal: what the autoscaler knows, for the next run,
and how soon each partition would be back, for `anabranch describe`. To lose one costs no row."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from anabranch.errors import StorageError
from anabranch.model.commands import NoteBackups
from anabranch.storage.generations import CLAIMS, claimed
from anabranch.storage.store import Store
from anabranch.storage.versions import format_of, other_format

log = logging.getLogger("anabranch")
AUTOSCALER = "autoscaler.json"  # of each generation: what it has decided and learnt
AUTOSCALER_FORMAT = 1
PREDICTION = "recovery.json"  # in the checkpoint directory: how soon each partition will be back
PREDICTION_FORMAT = 1


def autoscaler_memory(store: Store) -> Mapping[str, Any]:
    """Of the newest run that has left any; one that cannot be read is no loss."""
    for generation in reversed(claimed(store)):
        name = f"{CLAIMS}/{generation}/{AUTOSCALER}"
        try:
            found = json.loads(store.read(name) or b"")
        except (StorageError, ValueError):
            continue
        if not isinstance(found, dict):
            continue
        written = format_of(found)
        if written != AUTOSCALER_FORMAT:
            where, why = store.where(name), other_format(written, AUTOSCALER_FORMAT)
            log.warning("%s is not read: it %s", where, why)
            continue
        return {what: known for what, known in found.items() if what != "format"}
    return {}


def remember(store: Store, generation: int, memory: Mapping[str, Any]) -> None:
    """The autoscaler's memory, as a generation leaves it."""
    text = json.dumps({"format": AUTOSCALER_FORMAT, **memory})
    store.put(f"{CLAIMS}/{generation}/{AUTOSCALER}", [text.encode()], sync=False)


def write_prediction(store: Store, choice: NoteBackups) -> None:
    """How soon each partition will be back, where `describe` finds it."""
    partitions = {
        str(p): {"seconds": s, "backs_up": p in choice.backups}
        for p, s in choice.predicted_s.items()
    }
    written = {
        "format": PREDICTION_FORMAT,
        "partitions": partitions,
        "problem": choice.problem,
    }
    store.put(PREDICTION, [json.dumps(written).encode()], sync=False)

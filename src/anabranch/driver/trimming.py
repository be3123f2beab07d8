"""Deleting what nobody will read again.

What cannot be deleted is tried again with the next checkpoint: it takes room, but no slice needs
it gone.
"""

from __future__ import annotations

import logging

from anabranch.errors import StorageError
from anabranch.model.commands import TrimStorage
from anabranch.storage import checkpoint_store, source_log
from anabranch.storage.credentials import masked
from anabranch.storage.store import Store

log = logging.getLogger("anabranch")


def trim(store: Store, checkpoints: str, command: TrimStorage) -> None:
    """The source log below a slice, and checkpoint files that no cut names."""
    try:
        source_log.trim(store, command.log_below)
        for name in checkpoint_store.names(store, checkpoints):
            number = name.rpartition("/")[2].lstrip(".").partition("-")[0]
            if not number.isdigit() or name in command.keep_files:
                continue  # somebody else's, or needed
            if int(number) < command.log_below:
                _delete(store, name)
    except (StorageError, OSError) as e:
        log.warning("old files could not be listed: %s", e)


def _delete(store: Store, name: str) -> None:
    """One that stays must not keep the others."""
    try:
        checkpoint_store.delete(store, name)
    except (StorageError, OSError) as e:
        log.warning("%s could not be deleted yet: %s", masked(name), e)

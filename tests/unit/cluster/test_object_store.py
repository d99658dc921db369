"""A full object store is reported with what to free."""

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError

from verl.cluster import object_store
from verl.cluster.actors import await_reply
from verl.cluster.hangs.pending_calls import CallTarget
from verl.errors import StorageError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("error", [ObjectStoreFullError("full"), OutOfDiskError("full")])
def test_a_full_store_is_named_with_its_disk_and_the_settings(error, monkeypatch, tmp_path):
    monkeypatch.setattr(object_store, "get_session_folder", lambda: str(tmp_path))
    with (
        pytest.raises(StorageError, match=rf"{tmp_path}: [\d.]+ GiB are free.*object_store_memory"),
        object_store.map_full_errors(),
    ):
        raise error


async def test_a_call_that_fails_in_a_full_store_names_the_call():
    async def reply():
        error = OutOfDiskError("full")
        raise RayTaskError("put", "traceback", error)

    with pytest.raises(StorageError, match="train worker 1: pack_weights: the object store of"):
        await await_reply(reply(), action="pack_weights", target=CallTarget("train worker", 1))

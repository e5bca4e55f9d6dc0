"""Each sync is needed: without any single one of them, a power cut breaks a promise, or another test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from power.disk_states import Mode
from power.sync_sites import SyncSite, sync_sites
from power.test_power_cuts_anywhere import MODES, Recorded, recorded

OTHER_FILE_SYSTEM = "tests/test_power_cuts.py::test_a_root_on_another_file_system_is_synced_before_the_exchange"
IN_PLACE = "tests/test_power_cuts.py::test_the_preimage_is_synced_before_a_file_is_written_in_place"
SHORT_PROCESS = "tests/test_power_cuts.py::test_a_short_process_syncs_before_it_ends"
MARK = "tests/history/test_named_mutants.py::test_the_sync_mark_is_set_only_after_the_log_of_the_store_was_synced"
CATCH_UP = (
    "tests/store/test_housekeeping.py::TestTheMark::test_power_mode_does_not_rely_on_a_body_that_another_has_not_synced"
)
PREIMAGE = "tests/test_power_cuts.py::test_a_preimage_that_a_killed_process_stored_is_synced_before_its_original_goes"
NO_JOURNAL = "tests/power/mounted.py"

SEEN_BY_OTHER_TESTS = {
    "store/blobs.py:Blobs._catch_up:sync:1": CATCH_UP,
    "store/blobs.py:Blobs.sync:sync:1": PREIMAGE,
    "store/blobs.py:delete_unnamed_bodies:sync:2": NO_JOURNAL,
    "store/bodies.py:DirectoryBodies.put:_sync:1": CATCH_UP,
    "store/originals.py:_sync_places:fsync:1": SHORT_PROCESS,
    "store/sqlite.py:SqliteStore.close:sync_path:1": NO_JOURNAL,
    "store/sqlite.py:SqliteStore.sync:sync_path:1": MARK,
    "workspace/disk.py:HostDisk._sync_draft:fsync:1": OTHER_FILE_SYSTEM,
    "workspace/disk.py:HostDisk.drop_original:sync_preimages:1": OTHER_FILE_SYSTEM,
    "workspace/disk.py:HostDisk.drop_original:sync_dir:1": NO_JOURNAL,
    "workspace/disk.py:HostDisk.drop_original:sync_dir:2": NO_JOURNAL,
    "workspace/disk.py:HostDisk.exchange:_sync_draft:1": OTHER_FILE_SYSTEM,
    "workspace/disk.py:HostDisk.write_in_place:fsync:1": IN_PLACE,
    "workspace/disk.py:HostDisk.write_in_place:sync_preimages:1": IN_PLACE,
}
"""What the history of the tester does not reach, and the test that fails without it."""

NOT_SEEN_YET = frozenset(
    {
        "history/asides.py:set_aside:sync_copy:1",
        "store/bodies.py:DirectoryBodies._sync:_sync_directory:1",
        "store/bodies.py:DirectoryBodies._sync:sync_path:2",
        "store/bodies.py:sync_file_system:sync:1",
        "store/housekeeping.py:look_back:sync:2",
        "store/memory.py:MemoryStore.sync:sync:1",
        "store/originals.py:Left.sync:_sync:1",
        "store/secret_key.py:_make:fsync:1",
        "store/sqlite.py:SqliteStore.erase_deleted:sync:1",
        "store/sqlite.py:SqliteStore.erase_deleted:sync:2",
        "store/sqlite.py:SqliteStore.sync:sync:1",
        "workspace/disk.py:HostDisk.drop_original:sync_file:1",
        "workspace/disk.py:HostDisk.sync_file:sync_file_system:1",
    }
)
"""No test fails without these. The set may only shrink."""

SITES = [site for site in sync_sites() if site.name not in NOT_SEEN_YET and site.name not in SEEN_BY_OTHER_TESTS]


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> dict[Mode, Recorded]:
    folder = tmp_path_factory.mktemp("histories")
    return {mode: recorded(folder, mode) for mode in MODES}


@pytest.mark.slow
@pytest.mark.req("D5.each_sync_is_needed")
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_without_a_single_sync_a_power_cut_breaks_a_promise(site: SyncSite, histories: dict[Mode, Recorded]) -> None:
    tried = (one for history in histories.values() for one in history.results("without", site.frame))
    assert any(one["violations"] for one in tried)


@pytest.mark.req("D5.each_sync_is_needed")
def test_every_sync_is_tried_or_named() -> None:
    """A new sync is in the slow lane by itself, and a table that names one which is gone is out of date."""
    names = {site.name for site in sync_sites()}
    assert (SEEN_BY_OTHER_TESTS.keys() | NOT_SEEN_YET) - names == set()
    assert [test for test in SEEN_BY_OTHER_TESTS.values() if not _is_there(test)] == []
    assert len(SITES) >= 30


def _is_there(test: str) -> bool:
    file, *names = test.split("::")
    path = Path(__file__).parents[2] / file
    return path.is_file() and (not names or f"def {names[-1]}(" in path.read_text("utf-8"))

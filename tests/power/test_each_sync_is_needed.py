"""Each sync is needed: without any single one of them, a power cut breaks a promise, or another test fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.run import FAILED, copy_tree, run_tests
from tests.power.disk_states import Mode
from tests.power.sync_sites import SyncSite, sync_sites
from tests.power.test_power_cuts_anywhere import MODES, Recorded, recorded

POWER_CUTS, HEARD = "tests/power/test_process_mode.py::test_", "tests/power/test_recorded_syncs.py::test_"
OTHER_FILE_SYSTEM = POWER_CUTS + "a_root_on_another_file_system_is_synced_before_the_exchange"
IN_PLACE = POWER_CUTS + "the_preimage_is_synced_before_a_file_is_written_in_place"
SHORT_PROCESS = POWER_CUTS + "a_short_process_syncs_before_it_ends"
PREIMAGE = POWER_CUTS + "a_preimage_that_a_killed_process_stored_is_synced_before_its_original_goes"
MARK = "tests/history/test_named_mutants.py::test_the_sync_mark_is_set_only_after_the_log_of_the_store_was_synced"
BODIES = HEARD + "a_sync_of_the_store_syncs_its_large_bodies_and_their_names"
FORGET = HEARD + "forgetting_bytes_syncs_what_replaced_them_before_their_originals_go"
NO_JOURNAL = HEARD + "in_power_mode_without_a_journal_the_directory_is_synced_before_and_after_an_original_goes"

SEEN_BY_OTHER_TESTS = {
    "history/branches.py:copy_sandboxed_root:_sync_copy:1": HEARD
    + "in_power_mode_the_copy_of_a_sandboxed_root_is_synced",
    "store/blobs.py:Blobs.put:sync:1": (HEARD + "power_mode_syncs_a_body_that_another_process_stored_without_syncing"),
    "store/blobs.py:Blobs.sync:sync:1": PREIMAGE,
    "store/blobs.py:delete_unnamed_bodies:sync:2": HEARD + "the_name_of_a_deleted_body_is_synced",
    "store/blob_files.py:DirectoryBodies._sync:_sync_directory:1": BODIES,
    "store/blob_files.py:DirectoryBodies._sync:sync_path:2": BODIES,
    "store/blob_files.py:DirectoryBodies.put:_sync:1": (
        HEARD + "power_mode_syncs_a_body_that_is_there_already_without_a_row"
    ),
    "store/blob_files.py:sync_file_system:sync:1": HEARD + "without_syncfs_everything_is_synced",
    "store/maintenance.py:check_after_reboot:sync:2": (
        HEARD + "the_first_look_after_a_boot_syncs_the_bodies_that_are_there"
    ),
    "store/memory.py:MemoryStore.sync:sync:1": HEARD + "a_sync_of_a_store_in_memory_syncs_bodies_that_are_files",
    "store/originals.py:DeadProcessOriginals.sync:_sync:1": (
        HEARD + "what_is_synced_in_another_process_stead_is_the_file_its_directory_and_the_store"
    ),
    "store/originals.py:_sync_places:fsync:1": SHORT_PROCESS,
    "store/secret_key.py:_make:fsync:1": HEARD + "a_new_key_is_synced_before_it_has_its_name",
    "store/sqlite.py:SqliteStore.close:sync_path:1": HEARD + "in_power_mode_the_name_of_a_deleted_log_is_synced",
    "store/sqlite.py:SqliteStore.erase_deleted:sync:1": FORGET,
    "store/sqlite.py:SqliteStore.erase_deleted:sync:2": FORGET,
    "store/sqlite.py:SqliteStore.sync:sync:1": BODIES,
    "store/sqlite.py:SqliteStore.sync:sync_path:1": MARK,
    "files/disk.py:HostDisk._sync_draft:fsync:1": OTHER_FILE_SYSTEM,
    "files/disk.py:HostDisk.drop_original:sync_dir:1": NO_JOURNAL,
    "files/disk.py:HostDisk.drop_original:sync_dir:2": NO_JOURNAL,
    "files/disk.py:HostDisk.drop_original:sync_file:1": (
        HEARD + "a_file_that_cannot_be_moved_to_the_originals_is_synced_before_its_original_goes"
    ),
    "files/disk.py:HostDisk.drop_original:sync_preimages:1": OTHER_FILE_SYSTEM,
    "files/disk.py:HostDisk.exchange:_sync_draft:1": OTHER_FILE_SYSTEM,
    "files/disk.py:HostDisk.sync_file:sync_file_system:1": (
        HEARD + "in_power_mode_a_file_that_its_owner_may_not_read_is_synced_with_its_file_system"
    ),
    "files/disk.py:HostDisk.write_in_place:fsync:1": IN_PLACE,
    "files/disk.py:HostDisk.write_in_place:sync_preimages:1": IN_PLACE,
    "files/git.py:_lock:fsync:1": (
        HEARD + "each_file_of_git_in_a_linked_working_tree_is_synced_before_it_has_its_name"
    ),
}
"""What the history of the tester does not reach, and the test that fails without it."""

SITES = [site for site in sync_sites() if site.name not in SEEN_BY_OTHER_TESTS]


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


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_tree(tmp_path_factory.mktemp("copy") / "tree")


@pytest.mark.slow
@pytest.mark.req("D5.each_sync_is_needed")
@pytest.mark.parametrize("name", SEEN_BY_OTHER_TESTS)
def test_without_a_sync_that_the_tester_does_not_reach_the_named_test_fails(name: str, tree: Path) -> None:
    (site,) = (one for one in sync_sites() if one.name == name)
    file, test = tree / "src" / "mulligan" / site.file, SEEN_BY_OTHER_TESTS[name]
    source = file.read_bytes()
    assert run_tests(tree, (test,))[0] == 0
    file.write_bytes(site.left_out_of(source))
    try:
        code, printed = run_tests(tree, (test,))
    finally:
        file.write_bytes(source)
    assert code == FAILED, printed


@pytest.mark.req("D5.each_sync_is_needed")
def test_every_sync_is_tried_or_named() -> None:
    """A new sync is in the slow lane by itself, and a table that names one which is gone is out of date."""
    names = {site.name for site in sync_sites()}
    assert SEEN_BY_OTHER_TESTS.keys() - names == set()
    assert [test for test in SEEN_BY_OTHER_TESTS.values() if not _is_there(test)] == []
    assert len(SITES) >= 30


def _is_there(test: str) -> bool:
    file, *names = test.split("::")
    path = Path(__file__).parents[2] / file
    return path.is_file() and (not names or f"def {names[-1]}(" in path.read_text("utf-8"))

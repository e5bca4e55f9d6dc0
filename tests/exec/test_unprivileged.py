"""Everything works for a user without privileges; what the machine does not give is refused by name."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.exec.read_only_folders import LOOKING, WINDOWS
from tests.exec.unprivileged import WAYS
from tests.exec.unprivileged_user import NOBODY, run_as_nobody

LEFT_SHUT = "created:new created:new/in created:new/in/f mode:open modified:open/f deleted:open/g created:open/h"
USER = NOBODY if os.geteuid() == 0 else os.geteuid()


def in_windows(found: list[Any]) -> dict[str, list[Any]]:
    return dict.fromkeys(WINDOWS, found)


@pytest.mark.req("D7.notify_unprivileged", "D7.overlay_refused_with_reason")
def test_every_way_does_and_undoes() -> None:
    assert json.loads(run_as_nobody("tests.exec.unprivileged")) == {
        "user": USER,
        "undo": dict.fromkeys(WAYS, "back"),
        "rollback": dict.fromkeys(WAYS, "nonzero_exit"),
        "unreadable": dict.fromkeys(WAYS, "permission_denied"),
        "isolate": "back",
        "sandbox": "back",
        "network": "back",
        "foreign": "foreign_owner",
        "default": "notify",
    }


def test_changes_in_unreadable_folders_are_undone_whichever_process_dies() -> None:
    assert json.loads(run_as_nobody("tests.exec.read_only_folders")) == {
        "undo": dict.fromkeys(WAYS, "back"),
        "rollback": dict.fromkeys(WAYS, "nonzero_exit"),
        "left shut": dict.fromkeys(LOOKING, LEFT_SHUT),
        "opened": {
            "notify": [[["mode", "p"], ["modified", "p/f"]], [], ["p/f"]],
            **in_windows([[["mode", "p"]], [["p/f", "no_baseline"]], ["p/f"]]),
        },
        "opened and shut": {
            "notify": [[["modified", "p/f"]], [], ["p/f"]],
            **in_windows([[], [["p", "unreadable"]], ["p/f"]]),
        },
        "emptied": in_windows([[["mode", "p"]], [["p", "no_baseline"]], []]),
        "removed": in_windows([[["deleted", "p"]], [["p", "no_baseline"]], []]),
        "moved": in_windows([[["deleted", "p"]], [[path, "no_baseline"] for path in ("p", "q", "q/f")], ["q/f"]]),
        "moved, still shut": in_windows([[["deleted", "p"]], [["p", "no_baseline"], ["q", "unreadable"]], ["q/f"]]),
        "moved into a shut one": in_windows(
            [
                [["deleted", "p"], ["created", "q"]],
                [[path, "no_baseline"] for path in ("p", "q/p", "q/p/f")],
                ["q/p/f"],
            ],
        ),
        "shut by a person": [False, [["d", "conflicted"], ["d/f", "failed"]], True],
        "shut between": in_windows([True, [], [["p/f", "no_baseline"]]]),
        "tools": ["permission_denied", "permission_denied"],
        "closed": [False, [["a", "skipped", None], ["b", "failed", "io_error"]], True],
        "dead undo": "whole or not at all",
        "dead abort": ["put back", "put back"],
    }


@pytest.mark.req("D7.sandbox_unavailable", "D7.overlay_refused_with_reason")
def test_where_there_are_no_namespaces_what_needs_them_is_refused_and_the_rest_works() -> None:
    found = json.loads(run_as_nobody("tests.exec.unprivileged", "--no-namespaces"))
    works = dict.fromkeys(WAYS, "back") | {"overlay": "unsupported_strategy"}
    assert found == {
        "user": USER,
        "undo": works,
        "rollback": dict.fromkeys(WAYS, "nonzero_exit") | {"overlay": "unsupported_strategy"},
        "unreadable": dict.fromkeys(WAYS, "permission_denied") | {"overlay": "unsupported_strategy"},
        "isolate": "unsupported_strategy",
        "sandbox": "sandbox_unavailable",
        "network": "back",
        "foreign": "foreign_owner",
        "default": "notify",
    }

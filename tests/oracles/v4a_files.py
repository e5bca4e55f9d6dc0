"""V4A patches applied to files that are only names and bytes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mulligan.files.patch.v4a import Staged, parse_v4a, stage_v4a
from mulligan.values.errors import Refused
from mulligan.values.paths import RepoPath


def patch_of(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def stage(files: Mapping[str, bytes], patch: str) -> Staged:
    known = {RepoPath(name): content for name, content in files.items()}
    return stage_v4a(parse_v4a(patch), known.get)


def staged(files: Mapping[str, bytes], *lines: str) -> Staged:
    return stage(files, patch_of(*lines))


def updated(content: str, *lines: str) -> str:
    """The text of a file after an update."""
    result = staged({"f": content.encode()}, "*** Update File: f", *lines).files[RepoPath("f")]
    assert result is not None
    return result.decode()


def refusal(files: Mapping[str, bytes], *lines: str) -> tuple[str, str]:
    """Status and code of a patch that must be refused, with its message told as the one error."""
    with pytest.raises(Refused) as caught:
        staged(files, *lines)
    assert caught.value.fields == {"errors": [caught.value.message]}
    return caught.value.status, caught.value.code


def update_refusal(content: str, *lines: str) -> tuple[str, str]:
    return refusal({"f": content.encode()}, "*** Update File: f", *lines)

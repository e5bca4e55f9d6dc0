"""The parameters and the answers of S2's tools, each declared once. `servers.mcp.table` makes JSON Schemas of them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, ClassVar, Literal

from pydantic import Field, create_model

from mulligan.effects.params import Params, StrictModel

S2_COUNT_MAX = 2**53

CacheHint = Literal["immutable", "until_dirty"]

Count = Annotated[int, Field(ge=0, le=S2_COUNT_MAX)]
DigestText = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
# A Python caller may give a tuple.
Paths = Annotated[list[str], Field(strict=False)]


class HybridParams(Params):
    """For tools that look at the live files or at a snapshot."""

    mode: Literal["worktree", "snapshot"] = Field("worktree", description="The live files, or a snapshot.")
    snapshot_id: DigestText | None = Field(None, description="The snapshot to look at; needed in snapshot mode.")
    lease_id: str | None = Field(
        None, description="The lease of earlier reads: refuse with STALE_LEASE if what was seen has changed."
    )


class LeasedParams(Params):
    lease_id: str | None = Field(
        None, description="The lease of earlier reads: refuse with STALE_LEASE if what was seen has changed."
    )
    dry_run: bool = Field(False, description="Only say what would happen.")


class CreateParams(Params):
    about: ClassVar[str] = "Capture files as an immutable snapshot: the given paths, or everything read under a lease."

    lease_id: str | None = Field(None, description="Capture what was read under this lease, if no paths are given.")
    paths: Paths | None = Field(None, description="Files and directories (with everything in them) to capture.")


class ListParams(HybridParams):
    about: ClassVar[str] = "List a directory of the live tree or of a snapshot."

    path: str = Field(".", description="The directory to list.")
    depth: int = Field(1, ge=1, le=64, description="How many levels down.")
    limit: int = Field(1000, ge=0, le=100_000, description="At most so many entries.")
    offset: Count = Field(0, description="Skip so many entries.")
    include_ignored: bool = Field(False, description="Also what ignore files leave out.")


class FileParams(HybridParams):
    about: ClassVar[str] = "Read a file of the live tree or of a snapshot."

    path: str = Field(description="The file to read.")


class GrepParams(HybridParams):
    about: ClassVar[str] = "Search file contents by regular expression."

    pattern: str = Field(description="A regular expression without look-around and back-references.")
    paths: Paths | None = Field(None, description="Where to search; everywhere by default.")
    case_insensitive: bool = Field(False, description="Let case not matter.")
    max_files: Count = Field(10_000, description="Search at most so many files.")
    max_matches: Count = Field(1_000, description="Return at most so many matching lines.")


class DiffParams(HybridParams):
    about: ClassVar[str] = "Show changes as a unified diff that can be applied."

    path: str | None = Field(None, description="Only this file or directory.")
    from_snapshot_id: DigestText | None = Field(None, description="Compare with this snapshot.")
    against: Literal["head", "index"] = Field("head", description="Compare the live files with.")


class ChangesParams(Params):
    about: ClassVar[str] = "List which files a snapshot has added, modified or deleted."

    snapshot_id: DigestText = Field(description="The snapshot.")
    from_snapshot_id: DigestText | None = Field(
        None, description="Compare with this one; by default what it was made from, else HEAD."
    )


class InfoParams(Params):
    about: ClassVar[str] = "Say what a snapshot is of and how large it is."

    snapshot_id: DigestText = Field(description="The snapshot.")


class ExportParams(HybridParams):
    about: ClassVar[str] = "Export files as a tar archive with reproducible bytes."

    paths: Paths | None = Field(
        None, description="What to export; by default the whole snapshot, or what the lease touched."
    )


class PatchParams(HybridParams):
    about: ClassVar[str] = (
        "Apply a unified diff exactly as it says, all files or none, to the live tree or to a snapshot."
    )

    patch: str = Field(description="A unified diff. It applies exactly, at the stated lines, or not at all.")
    strip: int = Field(1, ge=0, le=32, description="Leading directories to drop.")
    dry_run: bool = Field(False, description="Only say what would happen.")


class WriteParams(LeasedParams):
    about: ClassVar[str] = "Write a file. The change can be undone."

    path: str = Field(description="The file to write.")
    content: str = Field(description="Its new content: text, or base64: and base64 for any bytes.")
    create_dirs: bool = Field(False, description="Make missing directories.")


class DeleteParams(LeasedParams):
    about: ClassVar[str] = "Delete a file, link or directory. The change can be undone."

    path: str = Field(description="The file, link or directory to delete.")
    recursive: bool = Field(False, description="Also what is in a directory.")


# Answers. The fields of a tool's success come after those of its shape, immutable or of the live tree.


class FingerprintText(StrictModel):
    head_oid: str = Field(pattern="^[0-9a-f]*$")
    index_oid: str = Field(pattern="^[0-9a-f]*$")
    status_hash: str = Field(pattern="^[0-9a-f]{64}$")


class _Immutable(StrictModel):
    cache_hint: Literal["immutable"]


class _Worktree(StrictModel):
    cache_hint: Literal["until_dirty"]
    lease_id: str
    fingerprint: FingerprintText


class _Stats(StrictModel):
    files: Count
    total_bytes: Count


class _Skipped(StrictModel):
    path: str
    reason: str


class _ListedEntry(StrictModel):
    path: str
    type: Literal["file", "dir", "symlink"]
    size: Count | None = None
    blob: DigestText | None = None


class _Match(StrictModel):
    path: str
    line: Count
    col: Count
    text: str


class _Change(StrictModel):
    path: str
    status: Literal["added", "modified", "deleted"]


class _RejectedHunk(StrictModel):
    index: Count
    reason: str


class _RejectedFile(StrictModel):
    path: str
    hunks: list[_RejectedHunk]


class CreateAnswer(StrictModel):
    snapshot_id: DigestText
    fingerprint: FingerprintText
    manifest_stats: _Stats
    skipped: list[_Skipped]


class ListAnswer(StrictModel):
    entries: list[_ListedEntry]
    total: Count
    truncated: bool


class FileAnswer(StrictModel):
    path: str
    content: str
    size: Count
    blob: DigestText
    eol: Literal["lf", "crlf", "mixed", "none"]


class GrepAnswer(StrictModel):
    matches: list[_Match]
    files_searched: Count
    truncated: bool


class DiffAnswer(StrictModel):
    diff: str


class ChangesAnswer(StrictModel):
    changes: list[_Change]


class InfoAnswer(StrictModel):
    fingerprint: FingerprintText
    manifest_stats: _Stats


class ExportAnswer(StrictModel):
    bundle: str
    sha256: DigestText


class PatchAnswer(StrictModel):
    applied: list[str]
    rejects: list[_RejectedFile]


class PatchedSnapshotAnswer(PatchAnswer):
    snapshot_id: DigestText


class WriteAnswer(StrictModel):
    path: str
    written_bytes: Count
    created: bool


class DeleteAnswer(StrictModel):
    path: str
    deleted: bool


@cache
def answer_model(fields: type[StrictModel], hint: CacheHint) -> type[StrictModel]:
    """A success with these fields. Made when first used: most processes use few tools."""
    if hint == "immutable":
        return create_model("ImmutableResponse", __base__=(fields, _Immutable))
    return create_model("WorktreeResponse", __base__=(fields, _Worktree))

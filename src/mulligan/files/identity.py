"""The identity of a directory, whatever its path: inode, generation and birth time, and the device within one boot.

1. The inode number of a deleted directory soon belongs to another one; generation and birth time differ.
2. Device numbers change from one boot to the next, so they are compared only if both were noted in the same boot.
3. A value that the file system does not have is 0, and 0 is compared with nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress

from mulligan.files import kernel
from mulligan.files.disk import Disk
from mulligan.store.host import boot_id
from mulligan.values.fast_dataclass import fast_dataclass

# Ends the identity of a directory in which names differ only up to case.
FOLDS = ":folds"

_FORM = "dir"


@fast_dataclass(slots=True, frozen=True)
class DirectoryIdentity:
    """A parsed identity. `boot` is "" in identities of formats that had no boot."""

    inode: int
    generation: int
    birth_ns: int
    device: int
    boot: str

    def agrees_with(self, other: DirectoryIdentity) -> bool:
        """Whether nothing shows that they are two directories."""
        same_boot = bool(self.boot) and self.boot == other.boot
        return (
            self.inode == other.inode
            and _agree(self.generation, other.generation)
            and _agree(self.birth_ns, other.birth_ns)
            and (not same_boot or self.device == other.device)
        )

    def is_surely(self, other: DirectoryIdentity) -> bool:
        """Whether they agree in more than the inode number, which file systems use again."""
        said = (self.generation and other.generation) or (self.birth_ns and other.birth_ns)
        return self.agrees_with(other) and bool(said or (self.boot and self.boot == other.boot))


def _agree(one: int, other: int) -> bool:
    return one == other or 0 in (one, other)


def parse_identity(text: str) -> DirectoryIdentity | None:
    """The identity in a text; None for a simulated root, which is on no disk."""
    form, *fields = text.removesuffix(FOLDS).split(":")
    with suppress(ValueError):
        if form == _FORM:
            inode, generation, birth_ns, device, boot = fields
            return DirectoryIdentity(int(inode), int(generation), int(birth_ns), int(device), boot)
        # Formats 1 to 3 had device, inode and generation.
        inode, generation = fields
        return DirectoryIdentity(int(inode), int(generation), 0, int(form), "")
    return None


def same_directory(one: str, other: str, *, surely: bool = False) -> bool:
    """Whether two identities may be of one directory; `surely`: beyond doubt."""
    first, second = parse_identity(one), parse_identity(other)
    if first is None or second is None:
        return one == other
    return first.is_surely(second) if surely else first.agrees_with(second)


def identity_of(disk: Disk) -> str:
    """The identity of an open root, as records have it."""
    if is_simulated(disk):
        return simulated_identity(disk.root.place)
    handle = disk.root.handle
    status = os.fstat(handle)
    numbers = (status.st_ino, kernel.generation_of(handle), kernel.birth_ns_of(handle), status.st_dev)
    return ":".join((_FORM, *map(str, numbers), boot_id().replace(":", "-"))) + (FOLDS if disk.root.folds_case else "")


def is_simulated(disk: Disk) -> bool:
    """Whether its root is simulated, so no directory of this machine."""
    return disk.root.handle < 0


def simulated_identity(place: bytes) -> str:
    return f"simulated:{os.fsdecode(place)}"

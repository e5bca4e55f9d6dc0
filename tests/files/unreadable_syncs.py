"""Run as a user without privileges: what `power` mode syncs if nobody may read the file. Prints JSON."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import mulligan
from mulligan.store import blob_files


def main() -> None:
    base = Path(tempfile.mkdtemp())
    try:
        (base / "work").mkdir()
        synced: list[str] = []
        real = blob_files._libc

        class Libc:
            def syncfs(self, handle: int) -> int:
                synced.append(os.readlink(f"/proc/self/fd/{handle}"))
                return int(real.syncfs(handle))

        blob_files._libc = Libc()  # type: ignore[assignment]
        with mulligan.open(base / "work", store=base / "home", durability="power") as product:
            synced.clear()
            with product.session("s").call() as call:
                before = os.umask(0o444)
                receipt = call.write_file("f", "secret")
                os.umask(before)
                assert receipt.ok, receipt
        print(json.dumps(str(base / "work") in synced))
    finally:
        shutil.rmtree(base)


if __name__ == "__main__":
    main()

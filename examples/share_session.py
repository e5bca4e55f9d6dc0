"""Share a session without its secrets, and go on with it on another machine.

Run it anywhere: it works in throw-away folders, and the token in it is made up on the spot.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mulligan

TOKEN = "ghp" + "_" + "a1B2c3D4e5" * 4


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here", Path(folder) / "there"
        here.mkdir()
        there.mkdir()
        with mulligan.open(str(here), store=str(Path(folder) / "store")) as m:
            session = m.session("release")
            session.inject({"role": "user", "content": f"Deploy {here}/app with {TOKEN}."})
            bundle = session.export()  # "sanitized"; "local" keeps everything, "replay_only" nothing that was said

        print("shared:   ", bundle["transcript"]["sections"][0]["messages"][0]["content"])
        for entry in bundle["redaction"]["entries"][:2]:
            print("redacted: ", entry["replacement"])

        with mulligan.open(str(there), store=str(Path(folder) / "other store")) as m:
            imported = m.session(m.sessions.import_bundle(bundle))
            print("same again:", imported.export()["bundle_id"] == bundle["bundle_id"])
            imported.inject({"role": "user", "content": "Go on from here."})
            print("goes on:  ", imported.length(), "messages")


if __name__ == "__main__":
    main()

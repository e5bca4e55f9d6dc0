"""Taking a session elsewhere and bringing one here: the doors to bundles and to other agents' files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from mulligan.history.desk import Desk
from mulligan.history.points import archive_of
from mulligan.session.bundle import Document, parse_mode
from mulligan.session.exporting import Wish, export_session
from mulligan.session.importing import import_bundle
from mulligan.session.private_names import PrivateNames
from mulligan.session.redaction import Policy
from mulligan.session.seeding import seed_from_jsonl
from mulligan.session.standing import Standing
from mulligan.session.transcript import Archive
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

_HOME_VARIABLES = ("HOME", "USERPROFILE")
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")


class Portable(Standing):
    """What a session offers about bundles."""

    _desk: Desk

    def export(self, mode: str = "sanitized", *, content: bool | None = None, policy: Policy | None = None) -> Document:
        """This session as a bundle: `sanitized` to share, `local` whole, `replay_only` without what was said.

        `content` puts the bodies of files into a local bundle. `policy` replaces what is taken out; whatever it is, a
        bundle that is not local never holds a secret of a known shape: `unredacted_secret` is raised instead.
        """
        wish = Wish(parse_mode(mode), content, policy or here(), place=_place(self._desk))
        return export_of(self._archive, self.id, wish)


def _place(desk: Desk) -> str:
    return os.fsdecode(desk.disk.root.path)


def export_of(archive: Archive, session: SessionId, wish: Wish) -> Document:
    return export_session(archive, session, replace(wish, version=version("mulligan")))


class Arrivals:
    """What all sessions of a workspace offer about bundles and files."""

    _desk: Desk

    def import_bundle(self, bundle: bytes | str | Mapping[str, Any], *, name: str | None = None) -> SessionId:
        """Make the session a bundle holds, under the id it had or another. Its id."""
        return import_bundle(archive_of(self._desk.ledger), self._desk.root.id, bundle, name=name)

    def export(self, id: str, mode: str = "sanitized", *, content: bool | None = None) -> Document:
        """A session as a bundle, open or closed."""
        wish = Wish(parse_mode(mode), content, here(), place=_place(self._desk))
        return export_of(archive_of(self._desk.ledger), SessionId(id), wish)

    def seed_from_jsonl(self, path: str, opts: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
        """Make a session from a transcript file; see `session.seeding` for options and answer."""
        if opts is not None and not isinstance(opts, Mapping):
            raise fault("invalid_params", "The options of seed_from_jsonl are an object.", field="opts")
        archive = archive_of(self._desk.ledger)
        return seed_from_jsonl(archive, self._desk.root.id, path, {**(opts or {}), **given})


def here(environ: Mapping[str, str] | None = None) -> Policy:
    """The usual policy, knowing the names of this machine and of who uses it."""
    known = os.environ if environ is None else environ
    homes = [known[name] for name in _HOME_VARIABLES if known.get(name)]
    users = [known[name] for name in _USER_VARIABLES if known.get(name)]
    with suppress(KeyError, ImportError):
        # Not on every system; the variables above will do there.
        import pwd

        mine = pwd.getpwuid(os.getuid())
        homes.append(mine.pw_dir)
        users.append(mine.pw_name)
    real = [os.path.realpath(home) for home in homes]
    host = socket.gethostname()
    hosts = (host, host.partition(".")[0])
    return Policy(names=PrivateNames(homes=_once(homes + real), users=_once(users), hosts=_once(hosts)))


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))

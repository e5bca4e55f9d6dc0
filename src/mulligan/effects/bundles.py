"""Taking a session elsewhere and bringing one here: bundles, and other agents' files."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
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
from mulligan.values.faults import fault
from mulligan.values.ids import SessionId

_HOME_VARIABLES = ("HOME", "USERPROFILE")
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER")


def exported(
    desk: Desk, session: SessionId, mode: str, *, content: bool | None = None, policy: Policy | None = None
) -> Document:
    place = os.fsdecode(desk.disk.root.path)
    wish = Wish(parse_mode(mode), content, policy or here(), place=place, version=version("mulligan"))
    return export_session(archive_of(desk.ledger), session, wish)


def imported(desk: Desk, bundle: bytes | str | Mapping[str, Any], *, name: str | None) -> SessionId:
    return import_bundle(archive_of(desk.ledger), desk.root.id, bundle, name=name)


def seeded(desk: Desk, path: str, options: Mapping[str, Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise fault("invalid_params", "The options of seed_from_jsonl are an object.", field="opts")
    return seed_from_jsonl(archive_of(desk.ledger), desk.root.id, path, {**(options or {}), **given})


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

"""What sessions offer about bundles and files of other agents. What that takes is loaded by who asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mulligan.history.desk import Desk
from mulligan.session.standing import Standing
from mulligan.values.ids import SessionId

if TYPE_CHECKING:
    from mulligan.session.bundle import Document
    from mulligan.session.redaction import Policy


class Portable(Standing):
    """What a session offers about bundles."""

    _desk: Desk

    def export(self, mode: str = "sanitized", *, content: bool | None = None, policy: Policy | None = None) -> Document:
        """This session as a bundle: `sanitized` to share, `local` whole, `replay_only` without what was said.

        `content` puts the bodies of files into a local bundle. `policy` replaces what is taken out; whatever it is, a
        bundle that is not local never holds a secret of a known shape: `unredacted_secret` is raised instead.
        """
        from mulligan.effects.bundles import exported

        return exported(self._desk, self.id, mode, content=content, policy=policy)


class Arrivals:
    """What all sessions of a workspace offer about bundles and files."""

    _desk: Desk

    def import_bundle(self, bundle: bytes | str | Mapping[str, Any], *, name: str | None = None) -> SessionId:
        """Make the session a bundle holds, under the id it had or another. Its id."""
        from mulligan.effects.bundles import imported

        return imported(self._desk, bundle, name=name)

    def export(self, id: str, mode: str = "sanitized", *, content: bool | None = None) -> Document:
        """A session as a bundle, open or closed."""
        from mulligan.effects.bundles import exported

        return exported(self._desk, SessionId(id), mode, content=content)

    def seed_from_jsonl(self, path: str, opts: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
        """Make a session from a transcript file; see `session.seeding` for options and answer."""
        from mulligan.effects.bundles import seeded

        return seeded(self._desk, path, opts, given)

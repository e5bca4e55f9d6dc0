"""A session on a workspace of its own, as the tests of effects want it: every receipt as a plain, canonical value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mulligan.boundary.capability import UNLIMITED, parse_capability
from mulligan.boundary.policy import NO_POLICY, parse_policy
from mulligan.effects.session import DurableSession
from mulligan.files.disk import Steps
from mulligan.testing import Tree, plant, tree_of
from mulligan.testing.builders import Sketch
from mulligan.values.canonical import decode, encode
from tests.temp_workspace import TempWorkspace, open_temp_workspace

Fields = dict[str, Any]


@dataclass
class EffectSession:
    workspace: TempWorkspace
    session: DurableSession

    @property
    def root(self) -> Path:
        return self.workspace.root

    def perform(self, effect: str, /, **params: Any) -> Fields:
        """The receipt as it would come over a wire: anything that is not canonical JSON fails here."""
        receipt, _ = self.session.perform(effect, params)
        body = receipt.to_dict()
        assert decode(encode(body)) == body
        return body

    def refused(self, effect: str, /, **params: Any) -> Fields:
        """A receipt that is not ok, without its message: that there is one for people is checked here."""
        body = self.perform(effect, **params)
        message = body.pop("error_message")
        assert isinstance(message, str) and message.strip()
        return body

    def within(
        self, capability: Mapping[str, object] | None = None, policy: Sequence[Mapping[str, object]] | None = None
    ) -> EffectSession:
        """The same workspace, in the hands of a session with less power."""
        limits = UNLIMITED if capability is None else parse_capability(capability)
        rules = NO_POLICY if policy is None else parse_policy(policy)
        return EffectSession(self.workspace, self.workspace.session("limited", capability=limits, policy=rules))

    def plant(self, sketch: Sketch) -> None:
        plant(self.root, sketch)

    def tree(self) -> Tree:
        return tree_of(self.root)

    def bytes_of(self, path: str) -> bytes:
        return (self.root / path).read_bytes()


def open_effect_session(base: Path, *, steps: Steps | None = None, name: str = "default") -> EffectSession:
    workspace = open_temp_workspace(base, steps=steps)
    return EffectSession(workspace, workspace.session(name))


def text(content: str) -> Fields:
    return {"inline_text": {"text": content}}


def denied(code: str) -> Fields:
    return {"status": "forbidden", "error_code": code}


def failed(code: str, status: str = "error", **fields: Any) -> Fields:
    return {"status": status, "error_code": code, **fields}

"""`ReplayRunner` runs an agent's program again with the recorded receipts, without touching files.

The program is a function of a session. The runner compares each effect with the recorded session's next effect and
returns the recorded receipt. It stops at the first effect that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from mulligan.effects.arguments import with_whole_numbers
from mulligan.effects.handle import AsyncEffects, Effects, asked
from mulligan.effects.perform import recorded
from mulligan.effects.receipt import Receipt
from mulligan.effects.registry import effect_named
from mulligan.effects.running_commands import without_env_values
from mulligan.effects.session import DurableSession
from mulligan.history.replay import Divergence, steps_of
from mulligan.session.transcript_log import Archive
from mulligan.values.errors import MulliganError, fault

Program = Callable[["ReplaySession"], object]


class ReplayDiverged(MulliganError):
    """The program performed another effect than the recorded one. `divergence` has both sides."""

    def __init__(self, divergence: Divergence) -> None:
        found = fault("replay_diverged", _words(divergence))
        super().__init__(found.code, found.message, step=divergence.step)
        self.divergence = divergence


def _words(divergence: Divergence) -> str:
    ours, theirs = divergence.ours, divergence.theirs
    return f"Step {divergence.step}: recorded {_shown(ours)}, now {_shown(theirs)}."


def _shown(step: Mapping[str, Any] | None) -> str:
    return "nothing" if step is None else f"{step['did']} with {dict(step['params'])}"


class ReplayRunner:
    """Runs programs against one recorded session."""

    def __init__(self, session: DurableSession) -> None:
        self._archive = session.archive
        with self._archive.store.read() as tx:
            self._steps = [step for step in steps_of(tx, session.id, whole=True) if "did" in step]

    def run(self, program: Program) -> int:
        """Run the program. Returns the number of effects, all recorded ones in order. Raises ReplayDiverged."""
        replaying = ReplaySession(self._steps, self._archive)
        program(replaying)
        if replaying.at < len(self._steps):
            raise ReplayDiverged(Divergence(replaying.at + 1, self._steps[replaying.at], None))
        return replaying.at


class ReplaySession:
    """A session that answers from the record. `at` counts the effects so far."""

    def __init__(self, steps: list[dict[str, Any]], archive: Archive) -> None:
        self.at = 0
        self._steps = steps
        self._archive = archive

    def call(self, label: str | None = None, **_: object) -> ReplayCall:
        return ReplayCall(self)

    @contextmanager
    def turn(self, prompt: str | None = None, id: str | None = None) -> Iterator[str]:
        yield id or "replayed"

    def perform(self, effect: str, params: Mapping[str, Any], **_: object) -> tuple[Receipt, str]:
        return self.answer(effect, params), ""

    def answer(self, effect: str, params: Mapping[str, Any]) -> Receipt:
        name = effect_named(effect).name
        given = without_env_values(self._archive.store.secret_key, with_whole_numbers(params))
        asked = {"did": name, "params": recorded(given)}
        known = self._steps[self.at] if self.at < len(self._steps) else None
        if known is None or (known["did"], known["params"]) != (asked["did"], asked["params"]):
            raise ReplayDiverged(Divergence(self.at + 1, known, asked))
        self.at += 1
        whole = self._with_bytes(known["receipt"])
        return Receipt(name, whole.pop("status"), whole)

    def _with_bytes(self, value: Any) -> Any:
        """A recorded value with its digests replaced by their bytes. Raises `missing_cas_dependency` if one is gone."""
        if isinstance(value, Mapping):
            if value.keys() == {"digest", "size_bytes"}:
                return self._archive.blobs.read(value["digest"]).decode("utf-8", "surrogatepass")
            return {name: self._with_bytes(item) for name, item in value.items()}
        return [self._with_bytes(item) for item in value] if isinstance(value, list) else value


class ReplayCall(Effects):
    """A replayed call, with the same methods as a real one, for `with` and `async with`."""

    def __init__(self, session: ReplaySession) -> None:
        self._session = session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The record says how the call ended."""

    async def __aenter__(self) -> AsyncEffects:
        return AsyncEffects(self)

    async def __aexit__(self, *error: object) -> None:
        """The record says how the call ended."""

    def perform(self, effect: str, /, **params: Any) -> Receipt:
        return self._session.answer(effect, asked(params))

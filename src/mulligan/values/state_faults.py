"""What can go wrong with the state of a run: S4's exceptions, each made from a message alone, as tools raise them."""

from __future__ import annotations

from typing import ClassVar

from mulligan.values.faults import Family, MulliganError


class _Spoken(MulliganError):
    """Made by people who write tools: a message is enough, the code is the class's own."""

    own_code: ClassVar[str]

    def __init__(self, message: str = "", **details: object) -> None:
        super().__init__(self.own_code, message, **details)

    def __reduce__(self) -> tuple[object, ...]:
        return _spoken_again, (type(self), self.message, dict(self.details))


def _spoken_again(kind: type[_Spoken], message: str, details: dict[str, object]) -> _Spoken:
    return kind(message, **details)


class ExecutionStateError(_Spoken, RuntimeError):
    """Something about the state of a run cannot be as it was asked for."""

    family = Family.BROKEN
    own_code = "execution_state"


class SnapshotMismatchError(ExecutionStateError):
    """A snapshot does not fit what it should be restored into. Nothing was changed."""

    family = Family.ASKED_WRONGLY
    own_code = "snapshot_mismatch"


class RestoreFailedError(ExecutionStateError):
    """A participant could not be restored. All of them are as they were before the attempt, unless `stuck` names some.

    If a tool's failure was the reason for restoring, that error is the cause of this one.
    """

    own_code = "restore_failed"


class CallNotOpenError(ExecutionStateError):
    """The call that this is a part of is over. Nothing was changed."""

    family = Family.ASKED_WRONGLY
    own_code = "call_not_open"


class ToolValidationError(_Spoken, ValueError):
    """The arguments of a tool call are not what the tool takes."""

    family = Family.ASKED_WRONGLY
    own_code = "tool_validation"


class VisibilityExpansionRequired(_Spoken):
    """The model asked for sections it cannot see yet: show them and evaluate again.

    `requested_overrides` maps section keys to the visibility wanted, if the tool says.
    """

    family = Family.WORLD_CHANGED
    own_code = "visibility_expansion_required"

    @property
    def requested_overrides(self) -> object:
        return self.details.get("requested_overrides", {})


class DeadlineExceededError(_Spoken, RuntimeError):
    """A tool found that the time of its evaluation is over."""

    family = Family.WORLD_CHANGED
    own_code = "deadline_exceeded"


class PromptEvaluationError(_Spoken, RuntimeError):
    """The evaluation of a prompt cannot go on. `prompt_name` and `phase` say where it was."""

    family = Family.BROKEN
    own_code = "prompt_evaluation"

    @property
    def prompt_name(self) -> str:
        return str(self.details.get("prompt_name", ""))

    @property
    def phase(self) -> str:
        return str(self.details.get("phase", "tool"))

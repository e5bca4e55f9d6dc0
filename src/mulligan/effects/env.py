"""Environments of commands. A record holds the names of the variables and an HMAC of each value, never a value.

A session that was opened with an environment has to give it to every later command, in other processes too. Its
boundary holds the values encrypted under the key of the state directory; without that key they are lost.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from mulligan.store.secret_key import SecretKey
from mulligan.values.canonical import decode, encode
from mulligan.values.plain import plain
from mulligan.values.refusal import Refused

_PARAMS = ("env", "env_patch")
_SEALED = "env_sealed"


def without_env_values(key: SecretKey, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of an effect as they may be recorded."""
    named = [name for name in _PARAMS if name in params]
    return {**params, **{name: _named_values(key, params[name]) for name in named}} if named else params


def sealed_env(key: SecretKey, env: Mapping[str, str]) -> dict[str, Any]:
    """The environment of a session, as its boundary records it."""
    if not env:
        return {"env": {}}
    sealed = "base64:" + b64encode(key.seal(encode(dict(env)))).decode("ascii")
    return {"env": _named_values(key, env), _SEALED: sealed}


def _named_values(key: SecretKey, env: object) -> Any:
    """What is no mapping of texts is refused by the effect; of that, a record holds only the type."""
    if env is None:
        return None
    if not isinstance(env, Mapping):
        return {"unrecorded": type(env).__name__}
    return {str(name): key.hmac("env", _raw(str(name)), _raw(str(value))) for name, value in env.items()}


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@plain(slots=True, frozen=True)
class SessionEnv:
    """The environment that a session was opened with; decrypted only when a command needs it."""

    session: str = ""
    body: Mapping[str, Any] | None = None
    key: SecretKey | None = None

    def values(self) -> Mapping[str, str]:
        """Answers `env_lost` where the key of the state directory is gone or is another one."""
        if self.body is None or self.key is None:
            return {}
        sealed = self.body.get(_SEALED)
        if sealed is None:
            # A session of an earlier version: its boundary holds the values themselves.
            values: Mapping[str, str] = self.body["env"]
            return values
        data = self.key.unseal(b64decode(sealed.removeprefix("base64:")))
        if data is None:
            words = f"The key that session {self.session!r} keeps its environment under is gone. Open a new session."
            raise Refused("error", "env_lost", words, names=sorted(self.body["env"]))
        found: Mapping[str, str] = decode(data)
        return found


NO_ENV = SessionEnv()

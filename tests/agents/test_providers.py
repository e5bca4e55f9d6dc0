"""The providers against real SDKs and a model on loopback: one tool is asked for, run, and its result comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mulligan
from mulligan.agents.providers import Driver, Provider, provider_named
from mulligan.agents.providers.openai import as_items
from mulligan.api import Mulligan, agent_loop
from mulligan.values.errors import MulliganError
from tests.servers.mcp.mock_model import mock_model

Made = Callable[[str], Provider | Driver]

MODELS: dict[str, Made] = {
    "responses": lambda url: provider_named("openai:mock", base_url=f"{url}/v1", api_key="k"),
    "chat": lambda url: provider_named("openai:mock", base_url=f"{url}/v1", api_key="k", api="chat"),
    "litellm": lambda url: provider_named("litellm:openai/mock", api_base=f"{url}/v1", api_key="k"),
    "litellm anthropic": lambda url: provider_named("litellm:anthropic/mock", api_base=url, api_key="k"),
}


def claude(url: str, home: Path) -> Provider | Driver:
    kept = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "k", "CLAUDE_CONFIG_DIR": str(home), "HOME": str(home)}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return provider_named("claude:claude-sonnet-4-5", env={**kept, **quiet}, cwd=str(home))


@pytest.fixture(autouse=True)
def _no_event_loop_is_left() -> Iterator[None]:
    """LiteLLM takes the thread's event loop, which makes one, and leaves it open."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield
    asyncio.set_event_loop(None)
    loop.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Mulligan]:
    (tmp_path / "work").mkdir()
    with mulligan.open(str(tmp_path / "work"), store=str(tmp_path / "home")) as found:
        yield found


@pytest.mark.parametrize("kind", MODELS)
def test_a_tool_is_run_and_its_result_reaches_the_model(opened: Mulligan, tmp_path: Path, kind: str) -> None:
    with mock_model("write_file", {"path": "a.txt", "content": "from a model\n"}) as model:
        session = opened.session("s")
        result = agent_loop("go", session=session, provider=MODELS[kind](model.address))
        assert (result.text, result.iterations, result.tool_calls) == ("done", 2, 1)
        assert result.output_tokens > 0
        assert "written_bytes" in model.results[-1]
    assert (tmp_path / "work" / "a.txt").read_text() == "from a model\n"
    assert session.rollback().ok
    assert not (tmp_path / "work" / "a.txt").exists()


@pytest.mark.parametrize("kind", MODELS)
def test_an_unreachable_model_is_an_error_and_the_prompt_is_kept(opened: Mulligan, kind: str) -> None:
    with mock_model("x", {}) as model:
        address = model.address
    provider = MODELS[kind](address)
    with pytest.raises(MulliganError) as caught:
        agent_loop("go", session="s", provider=provider)
    assert caught.value.code == "provider_failed"
    assert [message["role"] for message in opened.session("s").messages()] == ["user"]


def test_messages_become_items_in_order() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "well", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    kinds = [item.get("type") or item["role"] for item in as_items(messages)]
    assert kinds == ["user", "assistant", "function_call", "function_call_output"]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(MulliganError) as caught:
        provider_named("mock", colour="blue")
    assert caught.value.code == "no_provider"


class TestClaude:
    @pytest.mark.hosts
    def test_claudes_own_loop_runs_our_tools_as_calls(self, opened: Mulligan, tmp_path: Path) -> None:
        with mock_model("write_file", {"path": "a.txt", "content": "from claude\n"}) as model:
            session = opened.session("s")
            session.inject({"role": "user", "content": "remember the word plum"})
            result = agent_loop("go", session=session, provider=claude(model.address, tmp_path))
        assert (result.text, result.tool_calls) == ("done", 1)
        assert (tmp_path / "work" / "a.txt").read_text() == "from claude\n"
        assert [message["role"] for message in session.messages()] == ["user", "user", "assistant"]
        assert session.undo("toolu_1").ok
        assert not (tmp_path / "work" / "a.txt").exists()

    def test_an_unreachable_model_is_an_error(self, opened: Mulligan, tmp_path: Path) -> None:
        provider = provider_named("claude", cli_path=str(tmp_path / "none"))
        with pytest.raises(MulliganError) as caught:
            agent_loop("go", session="s", provider=provider)
        assert caught.value.code == "provider_failed"

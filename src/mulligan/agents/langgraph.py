"""LangGraph: a checkpointer on a Mulligan store, and Mulligan's tools for its agents.

```python
with mulligan.open(".") as m:
    tools = tools_for(m.session("review"))
    agent = create_react_agent(model, tools, checkpointer=MulliganSaver(m.store))
```
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from mulligan.agents.tools import needs_extra

try:
    from langchain_core.runnables import RunnableConfig
    from langchain_core.tools import StructuredTool, ToolException
    from langgraph.checkpoint.base import (
        WRITES_IDX_MAP,
        BaseCheckpointSaver,
        ChannelVersions,
        Checkpoint,
        CheckpointMetadata,
        CheckpointTuple,
        get_checkpoint_id,
        get_checkpoint_metadata,
    )
    from langgraph.checkpoint.serde.base import SerializerProtocol
except ModuleNotFoundError as error:
    raise needs_extra("The LangGraph adapter", "langgraph", error) from error

from mulligan.agents.coding_tools import runner_of
from mulligan.agents.runner import ToolRunner
from mulligan.agents.tools import AnyTool, ProviderToolCall, Tool
from mulligan.effects.session import DurableSession
from mulligan.history.checkpoint import ExecutionState
from mulligan.session.state.slices import ToolResult
from mulligan.session.tables import (
    GRAPH_CHECKPOINTS,
    GRAPH_VALUES,
    GraphCheckpointRow,
    GraphValueRow,
    GraphWriteRow,
    copy_thread,
    delete_points,
    delete_values,
    graph_checkpoints_of,
    graph_checkpoints_of_runs,
    newest,
    put_writes,
    threads,
    writes_of,
)
from mulligan.store.protocol import Store, Tx
from mulligan.values.errors import fault

_NO_VALUE = "empty"
_DELTAS: Final = "counters_since_delta_snapshot"


class MulliganSaver(BaseCheckpointSaver[str]):
    """A durable checkpointer for `graph.compile(checkpointer=…)`, safe for many threads and processes.

    It also has the optional methods of the interface: `copy_thread`, `prune`, `delete_for_runs`.
    """

    def __init__(self, store: Store, *, serde: SerializerProtocol | None = None) -> None:
        super().__init__(serde=serde)
        self._store = store

    # Reading.

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that the configuration names, or the newest of its thread; None if there is none."""
        thread, space = _thread_of(config), _space_of(config)
        wanted = get_checkpoint_id(config)
        with self._store.read() as tx:
            row = tx.get(GRAPH_CHECKPOINTS, thread, space, wanted) if wanted else newest(tx, thread, space)
            return None if row is None else self._tuple(tx, row)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Newest first, of one thread or of all."""
        found = self._matching(config, filter or {}, get_checkpoint_id(before) if before else None)
        for count, one in enumerate(found):
            if limit is not None and count >= limit:
                return
            yield one

    def _matching(
        self, config: RunnableConfig | None, wanted: dict[str, Any], before: str | None
    ) -> Iterator[CheckpointTuple]:
        space = config["configurable"].get("checkpoint_ns") if config else None
        point = get_checkpoint_id(config) if config else None
        with self._store.read() as tx:
            names = [_thread_of(config)] if config else threads(tx)
            rows = [row for name in names for row in graph_checkpoints_of(tx, name, space)]
        for row in rows:
            if (point and row.id != point) or (before and row.id >= before):
                continue
            about = self.serde.loads_typed((row.about_kind, row.about))
            if all(about.get(key) == value for key, value in wanted.items()):
                with self._store.read() as tx:
                    yield self._tuple(tx, row)

    def _tuple(self, tx: Tx, row: GraphCheckpointRow) -> CheckpointTuple:
        checkpoint: Checkpoint = self.serde.loads_typed((row.kind, row.body))
        values = self._values(tx, row, checkpoint["channel_versions"])
        return CheckpointTuple(
            config=_config(row.thread, row.space, row.id),
            checkpoint={**checkpoint, "channel_values": values},
            metadata=self.serde.loads_typed((row.about_kind, row.about)),
            parent_config=_config(row.thread, row.space, row.parent) if row.parent else None,
            pending_writes=[
                (write.task, write.channel, self.serde.loads_typed((write.kind, write.body)))
                for write in writes_of(tx, row)
            ],
        )

    def _values(self, tx: Tx, row: GraphCheckpointRow, versions: ChannelVersions) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for channel, version in versions.items():
            value = tx.get(GRAPH_VALUES, row.thread, row.space, channel, str(version))
            if value is not None and value.kind != _NO_VALUE:
                found[channel] = self.serde.loads_typed((value.kind, value.body))
        return found

    # Writing.

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """One checkpoint, and the values of the channels that have a new version in it."""
        thread, space = _thread_of(config), _space_of(config)
        about = get_checkpoint_metadata(config, metadata)
        body = {key: value for key, value in checkpoint.items() if key != "channel_values"}
        values = checkpoint["channel_values"]
        rows = [
            GraphValueRow(thread, space, channel, str(version), *self._dump_value(values, channel))
            for channel, version in new_versions.items()
        ]
        point = GraphCheckpointRow(
            *(thread, space, checkpoint["id"], get_checkpoint_id(config), about.get("run_id")),
            *self.serde.dumps_typed(body),
            *self.serde.dumps_typed(about),
        )
        with self._store.write() as tx:
            for row in rows:
                tx.put(GRAPH_VALUES, row)
            tx.put(GRAPH_CHECKPOINTS, point)
        return _config(thread, space, checkpoint["id"])

    def _dump_value(self, values: dict[str, Any], channel: str) -> tuple[str, bytes]:
        return self.serde.dumps_typed(values[channel]) if channel in values else (_NO_VALUE, b"")

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """What a task has written towards the next checkpoint. Said again, it counts once."""
        thread, space, point = _thread_of(config), _space_of(config), config["configurable"]["checkpoint_id"]
        rows = [
            GraphWriteRow(
                *(thread, space, point, task_id, WRITES_IDX_MAP.get(channel, number), task_path, channel),
                *self.serde.dumps_typed(value),
            )
            for number, (channel, value) in enumerate(writes)
        ]
        with self._store.write() as tx:
            put_writes(tx, rows)

    # Deleting and copying.

    def delete_thread(self, thread_id: str) -> None:
        """Deletes a thread: its checkpoints and their values."""
        with self._store.write() as tx:
            self._delete(tx, thread_id, graph_checkpoints_of(tx, thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Deletes the checkpoints of these runs, in all threads."""
        with self._store.write() as tx:
            to_delete: dict[str, list[GraphCheckpointRow]] = {}
            for row in graph_checkpoints_of_runs(tx, run_ids):
                to_delete.setdefault(row.thread, []).append(row)
            for thread, rows in to_delete.items():
                self._delete(tx, thread, rows)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copies a thread with all its checkpoints."""
        with self._store.write() as tx:
            copy_thread(tx, source_thread_id, target_thread_id)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """`keep_latest` keeps the newest checkpoint of each namespace and what it needs; `delete` keeps nothing."""
        if strategy not in ("keep_latest", "delete"):
            raise fault("invalid_params", f"There is no pruning strategy {strategy!r}; use keep_latest or delete.")
        with self._store.write() as tx:
            for thread in thread_ids:
                rows = graph_checkpoints_of(tx, thread)
                kept = self._needed_checkpoints(tx, rows) if strategy == "keep_latest" else set()
                self._delete(tx, thread, [row for row in rows if (row.space, row.id) not in kept])

    def _delete(self, tx: Tx, thread: str, to_delete: Sequence[GraphCheckpointRow]) -> None:
        """Deletes the checkpoints, their writes, and every value that no other checkpoint of the thread has."""
        delete_points(tx, to_delete)
        kept = {
            (row.space, channel, str(version))
            for row in graph_checkpoints_of(tx, thread)
            for channel, version in self.serde.loads_typed((row.kind, row.body))["channel_versions"].items()
        }
        delete_values(tx, thread, kept)

    def _needed_checkpoints(self, tx: Tx, rows: Sequence[GraphCheckpointRow]) -> set[tuple[str, str]]:
        """The newest checkpoint of each namespace, and the earlier ones that its delta channels start from."""
        by_name = {(row.space, row.id): row for row in rows}
        needed: set[tuple[str, str]] = set()
        for space in {row.space for row in rows}:
            row: GraphCheckpointRow | None = max((row for row in rows if row.space == space), key=lambda row: row.id)
            missing: set[str] | None = None
            while row is not None and missing != set():
                needed.add((row.space, row.id))
                found = self._tuple(tx, row)
                open_deltas = set(found.metadata.get(_DELTAS, ())) if missing is None else missing
                missing = open_deltas - found.checkpoint["channel_values"].keys()
                row = by_name.get((space, row.parent)) if row.parent else None
        return needed

    # The same for graphs that run in an event loop: the store is synchronous, so each goes to a thread.

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As `get_tuple`, for an event loop."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As `list`, for an event loop."""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (one := await asyncio.to_thread(next, found, None)) is not None:
            yield one

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As `put`, for an event loop."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """As `put_writes`, for an event loop."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`, for an event loop."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As `delete_for_runs`, for an event loop."""
        await asyncio.to_thread(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`, for an event loop."""
        await asyncio.to_thread(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """As `prune`, for an event loop."""
        await asyncio.to_thread(lambda: self.prune(thread_ids, strategy=strategy))

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Versions of one channel sort as text in the order in which they were made."""
        return f"{int((current or '0').partition('.')[0]) + 1:032}"


def tools_for(
    session: DurableSession | ExecutionState, tools: Iterable[AnyTool] | None = None, *, profile: str = "anthropic"
) -> list[StructuredTool]:
    """The coding tools of a profile, or your own tools and functions; each call is a transaction of the session."""
    runner = runner_of(session, tools, adapter="langgraph", profile=profile)
    return [_structured_tool(runner, tool) for tool in runner.tool_registry.values()]


class _SessionTool(StructuredTool):
    """Knows the id of the model's call; LangChain does not pass it to a tool with a plain schema."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _for_call(input):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        with _for_call(input):
            return await super().ainvoke(input, config, **kwargs)


_call_id: ContextVar[str] = ContextVar("mulligan_langgraph_call", default="")


@contextmanager
def _for_call(given: Any) -> Iterator[None]:
    token = _call_id.set(str(given.get("id") or "") if isinstance(given, dict) else "")
    try:
        yield
    finally:
        _call_id.reset(token)


def _structured_tool(runner: ToolRunner, tool: Tool[Any, Any]) -> StructuredTool:
    def run(**arguments: Any) -> str:
        return _message_or_error(runner.execute(ProviderToolCall(_call_id.get(), tool.name, arguments)))

    async def arun(**arguments: Any) -> str:
        return _message_or_error(await runner.aexecute(ProviderToolCall(_call_id.get(), tool.name, arguments)))

    return _SessionTool(
        name=tool.name,
        description=tool.description,
        args_schema=dict(tool.parameters),
        func=run,
        coroutine=arun,
        handle_tool_error=True,
    )


def _message_or_error(result: ToolResult[Any]) -> str:
    """A failure is a message with the status `error`, not the end of the graph."""
    if not result.success:
        raise ToolException(result.message)
    return result.message


def _thread_of(config: RunnableConfig) -> str:
    return str(config["configurable"]["thread_id"])


def _space_of(config: RunnableConfig) -> str:
    return str(config["configurable"].get("checkpoint_ns", ""))


def _config(thread: str, space: str, point: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": space, "checkpoint_id": point}}

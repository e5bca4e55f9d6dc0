"""What other people's programs rely on has not changed since it was frozen. Wording may change."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from tests.frozen.json_shapes import is_same
from tests.frozen.stores import BASE, STORES, log_of, unpack, verbs
from tests.frozen.surfaces import GOLDEN, SURFACES

EXACT = sorted(SURFACES.keys() - {"json_shapes.json", "tables.txt"})


@pytest.mark.req("D19.goldens")
@pytest.mark.parametrize("name", EXACT)
def test_a_surface_is_the_golden_one(name: str) -> None:
    assert SURFACES[name]().splitlines() == (GOLDEN / name).read_text("utf-8").splitlines()


@pytest.mark.req("D19.goldens")
def test_each_verb_prints_json_of_the_golden_shape() -> None:
    golden, now = (
        json.loads((GOLDEN / "json_shapes.json").read_text("utf-8")),
        json.loads(SURFACES["json_shapes.json"]()),
    )
    assert golden.keys() == now.keys()
    assert [verb for verb in golden if not is_same(golden[verb], now[verb])] == []


@pytest.mark.req("D19.goldens")
def test_no_column_of_a_table_is_removed_or_has_another_type() -> None:
    golden = (GOLDEN / "tables.txt").read_text("utf-8").splitlines()
    assert set(golden) - set(SURFACES["tables.txt"]().splitlines()) == set()


@pytest.mark.req("D19.goldens", "D4.format_5_migration")
@pytest.mark.parametrize("name", STORES)
def test_a_store_of_format_4_opens_verifies_and_has_the_same_log(name: str, tmp_path: Path) -> None:
    unpack(name, tmp_path / "home")
    run = verbs(tmp_path / "home", tmp_path)
    assert run("log", "--root", str(BASE / name)) == log_of(name)
    assert run("verify")["ok"]
    with closing(apsw.Connection(str(tmp_path / "home" / "store.db.format-4"))) as copy:
        journals = {journal for (journal,) in copy.execute("SELECT journal FROM heads WHERE journal <> ''")}
        assert copy.pragma("user_version") == 4
    with closing(apsw.Connection(str(tmp_path / "home" / "store.db"))) as migrated:
        (seal,) = migrated.execute("SELECT body FROM records WHERE journal = 'seals' AND seq = 1")
    assert json.loads(str(bytes(seal[0]), "utf-8"))["payload"]["heads"].keys() == journals
    shutil.rmtree(tmp_path / "home")

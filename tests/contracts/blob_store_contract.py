"""The contract of every place that holds large blobs."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from mulligan.store.protocol import BlobStore
from mulligan.values.digest import Digest, digest_of
from mulligan.values.errors import MulliganError

ONE, TWO = digest_of(b"one"), digest_of(b"two")


class BlobStoreContract(ABC):
    """Implement `open_bodies`. Opened again in the same directory, it must return the same blobs."""

    lasts = True

    @abstractmethod
    def open_bodies(self, directory: str) -> BlobStore: ...

    @pytest.fixture
    def directory(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="mulligan-bodies-") as directory:
            yield directory

    @pytest.fixture
    def bodies(self, directory: str) -> BlobStore:
        return self.open_bodies(directory)

    @pytest.mark.parametrize("durable", [False, True])
    @pytest.mark.parametrize("size", [0, 1, 1_000_000])
    def test_a_body_is_read_back_whole(self, bodies: BlobStore, size: int, durable: bool) -> None:
        body = Random(size).randbytes(size)
        bodies.put(ONE, body, durable=durable)
        assert bodies.get(ONE) == body

    @pytest.mark.parametrize("durable", [False, True])
    def test_the_first_body_of_a_digest_stays(self, bodies: BlobStore, durable: bool) -> None:
        bodies.put(ONE, b"first")
        bodies.put(ONE, b"second", durable=durable)
        assert bodies.get(ONE) == b"first"

    def test_an_unknown_body_is_missing(self, bodies: BlobStore) -> None:
        with pytest.raises(MulliganError) as missing:
            bodies.get(ONE)
        assert (missing.value.code, missing.value.details["digest"]) == ("missing_cas_dependency", ONE)

    def test_delete_removes_and_may_be_repeated(self, bodies: BlobStore) -> None:
        bodies.put(ONE, b"1")
        bodies.delete(ONE)
        bodies.delete(ONE)
        with pytest.raises(MulliganError):
            bodies.get(ONE)
        bodies.put(ONE, b"again")
        assert bodies.get(ONE) == b"again"

    def test_digests_lists_all_bodies_in_order(self, bodies: BlobStore) -> None:
        assert list(bodies.digests()) == []
        wanted = sorted(digest_of(bytes([n])) for n in range(50))
        for digest in wanted:
            bodies.put(digest, b"x")
        bodies.delete(wanted[7])
        assert list(bodies.digests()) == [*wanted[:7], *wanted[8:]]

    def test_sync_works_at_any_time(self, bodies: BlobStore) -> None:
        bodies.sync()
        bodies.put(ONE, b"1")
        bodies.put(TWO, b"2", durable=True)
        bodies.sync([ONE])
        bodies.delete(TWO)
        bodies.sync()
        bodies.sync([TWO])
        assert bodies.get(ONE) == b"1"

    def test_threads_that_put_the_same_body_at_once_all_succeed(self, bodies: BlobStore) -> None:
        datas = [Random(n).randbytes(20_000) for n in range(5)]

        def put(number: int) -> Digest:
            data = datas[number % len(datas)]
            bodies.put(digest_of(data), data)
            assert bodies.get(digest_of(data)) == data
            return digest_of(data)

        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(put, range(80)))
        assert list(bodies.digests()) == sorted(found)

    def test_durable_bodies_are_there_when_opened_again(self, directory: str) -> None:
        self.open_bodies(directory).put(ONE, b"1")
        assert list(self.open_bodies(directory).digests()) == ([ONE] if self.lasts else [])

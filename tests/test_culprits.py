"""A computation on which XLA aborts costs its island one restart, and is refused the next time."""

from __future__ import annotations

import signal

import numpy as np
import pytest

import pathway as pw
from pathway.executor.culprits import Culprits
from pathway.testing.cluster import local_cluster
from tests.aborting_compiler import UNSPEAKABLE


def test_only_a_crash_accuses() -> None:
    worker = Culprits.create()
    executor = Culprits(worker.descriptor)
    with executor.compiling("good"):
        pass
    with executor.compiling("bad"):
        assert worker.ended(-signal.SIGKILL, "signal SIGKILL") == []  # by somebody, or for memory
        assert worker.ended(-signal.SIGABRT, "signal SIGABRT") == []  # it was asked for already
    with executor.compiling("bad"):
        assert worker.ended(-signal.SIGABRT, "signal SIGABRT") == ["bad"]
        again = Culprits(worker.descriptor)
        assert again.why_refused("bad") == "signal SIGABRT"
        assert again.why_refused("good") == ""
    worker.close()


def test_it_is_refused_the_next_time() -> None:
    def unspeakable(x: object) -> object:
        return x + UNSPEAKABLE  # type: ignore[operator]

    options = {"preload": ("tests.aborting_compiler",)}
    with local_cluster({"east": {"devices": 1}}, **options) as cluster, pw.Client(cluster.address) as client:
        slice_ = client.slice(1)
        with pytest.raises(pw.IslandLostError, match="SIGABRT"):
            pw.jit(slice_)(unspeakable)(client.put(np.float32(1), slice_)).numpy()
        cluster.wait_for_incarnation("east", 2)
        with pytest.raises(pw.CompileError, match=r"refused, because an executor ended when it compiled it .*SIGABRT"):
            pw.jit(slice_)(unspeakable)(client.put(np.float32(1), slice_)).numpy()
        assert pw.jit(slice_)(lambda x: x * 2)(client.put(np.float32(2), slice_)).numpy() == 4
        assert cluster.island("east")["incarnation"] == 2

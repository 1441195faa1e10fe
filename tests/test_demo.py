"""The demo keeps what it promises, and its program computes what the same JAX computes in one process."""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from pathway import demo

optax = pytest.importorskip("optax")
pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[1]


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pathway.demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_the_whole_demo(tmp_path: Path) -> None:
    began = time.monotonic()
    ran = run_demo("--output", str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert time.monotonic() - began < 90
    assert "97% reached" in ran.stdout
    for name in ("demo-graph.svg", "demo-timeline.svg"):
        drawing = ElementTree.parse(tmp_path / name)
        text = "".join(drawing.getroot().itertext())
        assert "east" in text
        assert "west" in text


def test_a_missed_accuracy_is_an_exit_code(tmp_path: Path) -> None:
    ran = run_demo("--epochs", "1", "--require", "1.0", "--output", str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    assert "MISSED" in ran.stdout


def reference_losses(steps: int, batches: list[Any]) -> list[float]:
    """The losses of the same training in one process."""
    optimizer = optax.adam(optax.cosine_decay_schedule(demo.LEARNING_RATE, steps))

    @jax.jit
    def train_step(params: Any, state: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            losses = [
                demo.classify(params["back"], demo.extract(params["front"], some), wanted)[0]
                for some, wanted in zip(images, labels, strict=True)
            ]
            return sum(losses) / len(losses)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, value

    params: Any = demo.initial_params()
    state = optimizer.init(params)
    losses = []
    for images, labels in batches:
        params, state, value = train_step(params, state, images, labels)
        losses.append(float(value))
    return losses


def test_it_trains_as_one_process_would() -> None:
    import pathway as pw

    digits = demo.load_digits()
    batches = list(demo.microbatches(digits, np.random.default_rng(1)))[:4]
    with pw.connect(islands=demo.ISLANDS):
        trainer = demo.Trainer(len(batches))
        losses = [float(value) for value in [trainer.step(images, labels) for images, labels in batches]]
    np.testing.assert_allclose(losses, reference_losses(len(batches), batches), rtol=1e-4)


def test_the_split_is_always_the_same_and_has_nothing_in_both() -> None:
    first, second = demo.load_digits(), demo.load_digits()
    assert len(first.train_labels) + len(first.held_out_labels) == 1797
    np.testing.assert_array_equal(first.held_out_images, second.held_out_images)


def test_busy_is_the_union_of_what_ran() -> None:
    spans = [("a", 0.0, 1.0), ("a", 0.5, 2.0), ("a", 3.0, 4.0), ("b", 0.0, 1.0)]
    steps = [SimpleNamespace(island=island, start_s=start, end_s=end) for island, start, end in spans]
    assert demo.busy_fractions(steps) == {"a": 0.75, "b": 0.25}
    assert demo.busy_fractions([]) == {}

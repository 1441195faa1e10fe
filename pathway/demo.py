"""`make demo`: train a classifier of handwritten digits as a pipeline over two islands, on the public API alone.

The network is cut into two unequal stages. The front stage runs data parallel on island *east*, which has two hosts
with two devices each; the back stage runs tensor parallel on island *west*, one host with two devices. One program is
the whole training step: microbatches through both stages, `jax.value_and_grad` back through both, and adam for each
stage where its parameters live. The data are scikit-learn's 1,797 digits; a fifth of them, always the same, is held
out.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import pathway as pw

Tree = Any
"""A pytree of arrays."""

ISLANDS = {"east": {"hosts": 2, "devices": 2}, "west": {"hosts": 1, "devices": 2}}

HELD_OUT = 360
MICROBATCHES = 4
MICROBATCH_SIZE = 32
EPOCHS = 20
LEARNING_RATE = 3e-3
SEED = 0

STEPS_IN_FLIGHT = 8
"""How many steps are started before the loss of the first is read: enough that the islands never wait for this
process."""

RECORDED_STEPS = 3
"""The timeline shows so many steps, the last ones of the training."""


# -- data -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images of 64 pixels from 0 to 1, and which digit each is."""

    train_images: np.ndarray
    train_labels: np.ndarray
    held_out_images: np.ndarray
    held_out_labels: np.ndarray


def load_digits(seed: int = SEED) -> Digits:
    """The digits, shuffled by `seed`; the last `HELD_OUT` are held out."""
    bunch = extra("sklearn.datasets").load_digits()
    order = np.random.default_rng(seed).permutation(len(bunch.target))
    images = (bunch.data[order] / 16.0).astype(np.float32)
    labels = bunch.target[order].astype(np.int32)
    return Digits(images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:])


def extra(module: str) -> Any:
    """A module of the extra packages that only the demo needs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SystemExit("the demo needs optax and scikit-learn: pip install 'pathway-jax[demo]'") from None


def microbatches(digits: Digits, rng: np.random.Generator) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """One epoch of batches, each as lists of microbatches: images, and labels."""
    order = rng.permutation(len(digits.train_labels))
    batch_size = MICROBATCHES * MICROBATCH_SIZE
    for start in range(0, len(order) - batch_size + 1, batch_size):
        parts = np.split(order[start : start + batch_size], MICROBATCHES)
        yield [digits.train_images[part] for part in parts], [digits.train_labels[part] for part in parts]


def steps_per_epoch(digits: Digits) -> int:
    return len(digits.train_labels) // (MICROBATCHES * MICROBATCH_SIZE)


# -- the model: plain JAX ---------------------------------------------------------------------------------------------


def initial_params(seed: int = SEED) -> dict[str, dict[str, np.ndarray]]:
    """Random weights of both stages, on the host."""
    rng = np.random.default_rng(seed)

    def weights(inputs: int, outputs: int) -> np.ndarray:
        return rng.normal(0.0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32)

    def biases(outputs: int) -> np.ndarray:
        return np.zeros(outputs, np.float32)

    return {
        "front": {
            "hidden": weights(64, 256),
            "hidden_bias": biases(256),
            "out": weights(256, 128),
            "out_bias": biases(128),
        },
        "back": {"up": weights(128, 256), "up_bias": biases(256), "down": weights(256, 10), "down_bias": biases(10)},
    }


def extract(params: Tree, images: jax.Array) -> jax.Array:
    """The front stage: from pixels to features."""
    hidden = jax.nn.gelu(images @ params["hidden"] + params["hidden_bias"])
    features: jax.Array = jax.nn.gelu(hidden @ params["out"] + params["out_bias"])
    return features


def classify(params: Tree, features: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The back stage: the mean loss, and how many were right."""
    hidden = jax.nn.gelu(features @ params["up"] + params["up_bias"])
    logits = hidden @ params["down"] + params["down_bias"]
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)
    return -likelihood.mean(), (logits.argmax(-1) == labels).sum()


# -- the program: where each part of it lives -------------------------------------------------------------------------


BACK_SPECS = {"up": P(None, "model"), "up_bias": P("model"), "down": P("model", None), "down_bias": P()}
"""Tensor parallel: the hidden layer is split over the devices, and its output summed by XLA."""


class Trainer:
    """The two slices, the training step and the evaluation over them, and the state that they carry along."""

    def __init__(self, steps: int) -> None:
        optax = extra("optax")
        self.front = pw.slice(4, mesh={"data": 4}, island="east")
        self.back = pw.slice(2, mesh={"model": 2}, island="west")
        optimizer = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))

        front_stage = pw.jit(self.front, in_specs=(P(), P("data")), out_specs=P("data"))(extract)
        back_stage = pw.jit(self.back, in_specs=(BACK_SPECS, P(), P()), out_specs=P())(classify)

        @pw.program(donate_argnums=(0, 1))
        def train_step(params: Tree, states: Tree, images: Tree, labels: Tree) -> tuple[Tree, Tree, Tree]:
            def loss(params: Tree) -> Tree:
                total = 0.0
                for some_images, some_labels in zip(images, labels, strict=True):
                    features = front_stage(params["front"], some_images)
                    total += back_stage(params["back"], features, some_labels)[0]
                return total / MICROBATCHES

            value, gradients = jax.value_and_grad(loss)(params)
            updated, next_states = {}, {}
            with jax.named_scope("adam"):
                for stage in params:
                    updates, next_states[stage] = optimizer.update(gradients[stage], states[stage], params[stage])
                    updated[stage] = optax.apply_updates(params[stage], updates)
            return updated, next_states, value

        @pw.program
        def evaluate(params: Tree, images: Tree, labels: Tree) -> Tree:
            return back_stage(params["back"], front_stage(params["front"], images), labels)[1]

        self.train_step = train_step
        self.evaluate = evaluate
        host_params = initial_params()
        host_states = {stage: optimizer.init(tree) for stage, tree in host_params.items()}
        back_state_specs = optax.tree_map_params(
            optimizer, lambda _, spec: spec, host_states["back"], BACK_SPECS, transform_non_params=lambda _: P()
        )
        self.params = {
            "front": pw.put(host_params["front"], self.front, P()),
            "back": pw.put(host_params["back"], self.back, BACK_SPECS),
        }
        self.states = {
            "front": pw.put(host_states["front"], self.front, P()),
            "back": pw.put(host_states["back"], self.back, back_state_specs),
        }

    def step(self, images: Tree, labels: Tree) -> Tree:
        """Start one training step; a future of its loss."""
        self.params, self.states, loss = self.train_step(self.params, self.states, images, labels)
        return loss

    def start_evaluation(self, digits: Digits) -> Tree:
        """A future of how many held-out digits the parameters of this moment get right."""
        return self.evaluate(self.params, digits.held_out_images, digits.held_out_labels)


# -- training, and what it shows --------------------------------------------------------------------------------------


def train(trainer: Trainer, digits: Digits, epochs: int, console: Console) -> tuple[float, pw.Recording]:
    """Train; show loss and accuracy on the way. Returns the held-out accuracy and the record of the last steps."""
    rng = np.random.default_rng(SEED)
    per_epoch = steps_per_epoch(digits)
    batches = [batch for _ in range(epochs) for batch in microbatches(digits, rng)]
    held_out = len(digits.held_out_labels)
    losses: collections.deque[Tree] = collections.deque()
    rights: list[Tree] = []
    with training_progress(console) as progress:
        task = progress.add_task("training", total=len(batches), loss="", accuracy="")

        def show_until(in_flight: int) -> None:
            while len(losses) > in_flight:
                loss = float(losses.popleft())
                known = [right for right in rights if right.is_ready()]
                accuracy = f"held out {float(known[-1]) / held_out:.2%}" if known else ""
                progress.update(task, advance=1, loss=f"loss {loss:.4f}", accuracy=accuracy)

        def run(first: int, last: int) -> None:
            for number in range(first, last):
                losses.append(trainer.step(*batches[number]))
                if (number + 1) % per_epoch == 0 and number + 1 < len(batches):
                    rights.append(trainer.start_evaluation(digits))
                show_until(STEPS_IN_FLIGHT)
            show_until(0)
            jax.block_until_ready(trainer.params)  # a loss is known before its step has ended

        run(0, len(batches) - RECORDED_STEPS)
        with pw.record_steps() as recording:
            run(len(batches) - RECORDED_STEPS, len(batches))
        accuracy = float(trainer.start_evaluation(digits)) / held_out
        progress.update(task, accuracy=f"held out {accuracy:.2%}")
    return accuracy, recording


def training_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[accuracy]}"),
        console=console,
    )


def busy_fractions(steps: Iterable[pw.RecordedStep]) -> dict[str, float]:
    """For every island, the part of the recorded time in which it computed something."""
    spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for step in steps:
        spans[step.island].append((step.start_s, step.end_s))
    if not spans:
        return {}
    began = min(start for island in spans.values() for start, _ in island)
    ended = max(end for island in spans.values() for _, end in island)
    return {island: _covered_s(sorted(intervals)) / (ended - began) for island, intervals in spans.items()}


def _covered_s(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals that are sorted by their start."""
    covered, until = 0.0, float("-inf")
    for start, end in intervals:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def where_it_ran(trainer: Trainer, recording: pw.Recording) -> Table:
    """A table of the islands: what they are, what ran there, and how busy they were."""
    busy = busy_fractions(recording.steps)
    ran = collections.Counter(step.island for step in recording.steps)
    table = Table(title=f"what ran where, in {RECORDED_STEPS} steps of {MICROBATCHES} microbatches")
    for heading in ("island", "hosts x devices", "mesh", "stage", "computations", "busy"):
        table.add_column(heading)
    islands = {island.name: island for island in pw.islands()}
    for stage, slice_ in ((extract, trainer.front), (classify, trainer.back)):
        island = islands[slice_.island]
        table.add_row(
            island.name,
            f"{island.hosts} x {island.devices_per_host}",
            ", ".join(f"{axis}={size}" for axis, size in slice_.mesh.items()),
            stage.__name__,
            str(ran[island.name]),
            f"{busy.get(island.name, 0.0):.0%}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """The demo. Exit code 1 says that the accuracy was missed."""
    parser = argparse.ArgumentParser(
        prog="pathway demo",
        description="Train a digit classifier as a pipeline over two islands of this machine.",
        epilog="example: pathway demo --epochs 10 --output /tmp",
    )
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help="passes over the training digits (default %(default)s)"
    )
    parser.add_argument("--require", type=float, default=0.97, help="least held-out accuracy (default %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the drawings (default: this one)")
    options = parser.parse_args(argv)
    if options.epochs < 1:
        parser.error("--epochs must be at least 1")
    console = Console()
    began = time.monotonic()
    digits = load_digits()
    counts = f"{len(digits.train_labels):,} digits to train on, {len(digits.held_out_labels)} held out"
    console.print(f"{counts} (shuffled by seed {SEED})")
    with pw.connect(islands=ISLANDS):
        console.print(f"a cluster of {len(pw.islands())} islands after {time.monotonic() - began:.1f} s")
        trainer = Trainer(options.epochs * steps_per_epoch(digits))
        first_batch = next(microbatches(digits, np.random.default_rng(SEED)))
        lowered = trainer.train_step.trace(trainer.params, trainer.states, *first_batch).lower()
        accuracy, recording = train(trainer, digits, options.epochs, console)
        console.print(where_it_ran(trainer, recording))
        drawings = {
            "demo-graph.svg": lowered.draw(),
            "demo-timeline.svg": recording.draw(title="the last training steps"),
        }
    options.output.mkdir(parents=True, exist_ok=True)
    for name, svg in drawings.items():
        (options.output / name).write_text(svg)
        console.print(f"wrote {options.output / name}")
    reached = accuracy >= options.require
    verdict = "reached" if reached else "MISSED"
    console.print(
        f"held-out accuracy {accuracy:.2%} ({options.require:.0%} {verdict}), {time.monotonic() - began:.1f} s in all"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())

"""Training the language model: pipelines on islands, replicas of them, tensor parallel inside; one program a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pathway as pw
from pathway.programs.layers import split_layers
from pathway.programs.llm import checkpoints, model, text
from pathway.programs.llm.settings import Settings, Train
from pathway.programs.pipelines import pipeline
from pathway.programs.replicas import data_parallel

Tree = Any

TOKENIZER = "tokenizer.json"
"""In a training's directory, where tokens are not bytes."""


def optimizer_of(train: Train) -> Any:
    """AdamW under a cosine with a warm-up, gradients clipped by their global norm."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, train.learning_rate, train.warmup, max(train.steps, train.warmup + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm), optax.adamw(rate, b2=0.95, weight_decay=train.weight_decay)
    )


@dataclasses.dataclass(frozen=True)
class _Home:
    """Where a parameter lives."""

    slice: pw.Slice
    spec: P


class Trainer:
    """The slices, the programs over them, and the state that they carry along."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        config, parallel, train = settings.model, settings.parallel, settings.train
        self.text = text.read(settings.text, config.context, config.vocabulary, settings.directory / TOKENIZER)
        self.parts = model.stages(config, split_layers(range(config.layers), stages=parallel.stages))
        self.optimizer = optimizer_of(train)
        specs = model.specs(config)
        host = model.init(config, train.seed)
        self.slices: list[list[pw.Slice]] = []
        self.homes: list[Tree] = []
        pipes = []
        for _ in range(parallel.replicas):
            slices = [pw.slice(parallel.tensor, mesh={"model": parallel.tensor}) for _ in self.parts]
            stages = [
                pw.jit(slice, in_specs=(part.pick(specs), P()), name=f"stage{number}")(part.run)
                for number, (slice, part) in enumerate(zip(slices, self.parts, strict=True))
            ]
            picks = [part.pick for part in self.parts]
            options: dict[str, Any] = {"microbatches": parallel.microbatches, "schedule": parallel.schedule}
            pipes.append(pipeline(stages, model.cross_entropy, params_of=picks, **options))
            self.slices.append(slices)
            self.homes.append(self._homes(host, specs, slices))
        self.step_number = 0
        self.params, self.states = self._put(host, self.optimizer.init(host))
        self.replicas = data_parallel(pipes)

        @pw.program(schedule="program", donate_argnums=(0, 1))
        def train_step(params: list[Tree], states: list[Tree], inputs: Any, targets: Any) -> Any:
            value, gradients = self.replicas(params, inputs, targets)
            updated = [self.optimizer.update(*some) for some in zip(gradients, states, params, strict=True)]
            params = [optax.apply_updates(p, updates) for p, (updates, _) in zip(params, updated, strict=True)]
            return params, [state for _, state in updated], value

        @pw.program
        def forward(params: Tree, inputs: Any) -> Any:
            x = inputs
            for part, stage in zip(self.parts, pipes[0].stages, strict=True):
                x = stage(part.pick(params), x)
            return x

        self._train_step, self._evaluate, self._forward = train_step, pipes[0].evaluate, forward

    def _homes(self, host: Tree, specs: Tree, slices: list[pw.Slice]) -> Tree:
        """Of every parameter the slice of the first stage that picks it."""
        first: dict[int, pw.Slice] = {}
        for part, slice in zip(self.parts, slices, strict=True):
            for leaf in jax.tree.leaves(part.pick(host)):
                first.setdefault(id(leaf), slice)
        return jax.tree.map(lambda leaf, spec: _Home(first[id(leaf)], spec), host, specs)

    def _put(self, host: Tree, state: Tree) -> tuple[list[Tree], list[Tree]]:
        """Parameters and optimizer states of all replicas, where they belong."""

        def put(leaf: Any, home: _Home) -> Any:
            return pw.put(np.asarray(leaf), home.slice, home.spec)

        params = [jax.tree.map(put, host, homes) for homes in self.homes]
        states = []
        for homes in self.homes:
            first = jax.tree.leaves(homes)[0].slice
            states.append(
                optax.tree_map_params(
                    self.optimizer,
                    put,
                    state,
                    homes,
                    transform_non_params=lambda leaf, slice=first: pw.put(np.asarray(leaf), slice),
                )
            )
        return params, states

    def step(self) -> Any:
        """Start the next step; a future of its loss."""
        train, config = self.settings.train, self.settings.model
        inputs, targets = text.batch(self.text.train, train.batch, config.context, train.seed, self.step_number)
        self.params, self.states, value = self._train_step(self.params, self.states, inputs, targets)
        self.step_number += 1
        return value

    def held_out_loss(self) -> float:
        """The loss over some of the held-out text, always the same."""
        train, config = self.settings.train, self.settings.model
        values = []
        for number in range(train.evaluate_batches):
            batch = text.batch(self.text.held_out, train.batch, config.context, train.seed, number)
            values.append(self._evaluate(self.params[0], *batch))
        return float(np.mean([float(value) for value in values]))

    def sample(self, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
        """`prompt`, and so many tokens that the model thinks come next."""
        config, rng = self.settings.model, np.random.default_rng(seed)
        tokens = self.text.tokens
        written = [int(token) for token in tokens.encode(prompt or b"\n")]
        for _ in range(count):
            recent = written[-config.context :]
            padded = np.zeros((1, config.context), np.int32)
            padded[0, : len(recent)] = recent
            scores = self._forward(self.params[0], padded).numpy()[0, len(recent) - 1] / temperature
            odds = np.exp(scores - scores.max())
            written.append(int(rng.choice(len(odds), p=odds / odds.sum())))
        return tokens.decode(written)

    def save(self) -> Any:
        """Write a checkpoint; returns its folder."""
        return checkpoints.save(
            self.settings.directory, self.step_number, pw.get(self.params[0]), pw.get(self.states[0])
        )

    def resume(self) -> bool:
        """Go on from the latest checkpoint, to the last bit as if there had been no break. False: there is none."""
        found = checkpoints.latest(self.settings.directory)
        if found is None:
            return False
        params, state = pw.get(self.params[0]), pw.get(self.states[0])
        self.step_number, params, state = checkpoints.restore(found, params, state)
        self.params, self.states = self._put(params, state)
        return True

    def replicas_agree(self) -> bool:
        """Whether all replicas have the same parameters, to the last bit."""
        return len(set(self.replicas.checksums(self.params))) == 1

    def release(self) -> None:
        """Give the devices back."""
        for slice in (slice for slices in self.slices for slice in slices):
            slice.release()


def islands_for(settings: Settings) -> dict[str, dict[str, int]]:
    """A cluster with an island for every stage of every replica."""
    parallel = settings.parallel
    names = [f"replica{r}-stage{s}" for r in range(parallel.replicas) for s in range(parallel.stages)]
    return {name: {"hosts": 1, "devices": parallel.tensor} for name in names}


def in_one_process(settings: Settings, steps: int) -> list[float]:
    """The losses of the same training in plain JAX, without any cluster: what the trainer's are compared with."""
    config, train = settings.model, settings.train
    read, optimizer = text.read(settings.text, config.context, config.vocabulary), optimizer_of(train)

    def loss(params: Tree, inputs: Any, targets: Any) -> Any:
        return model.cross_entropy(model.logits(params, inputs, config), targets)

    def step(params: Tree, state: Tree, inputs: Any, targets: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    compiled = jax.jit(step)
    params: Tree = model.init(config, train.seed)
    state, losses = optimizer.init(params), []
    for number in range(steps):
        batch = text.batch(read.train, train.batch, config.context, train.seed, number)
        params, state, value = compiled(params, state, *batch)
        losses.append(float(value))
    return losses

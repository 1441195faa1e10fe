"""Models chosen per example, by data: an early exit, and a tree of models.

A small model looks at every handwritten digit. Where it is sure, its answer stands. The others go to one of two larger
models, on other islands: a router sends each to the specialist that the small model's first guess calls for (round
digits or straight ones), and no digit goes to both. Where the small model is sure of all digits, the larger ones do not
run at all.

    python examples/cascade.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import pathway as pw

SURE = 0.8
ROUND = (0, 2, 3, 5, 6, 8, 9)  # the others are straight


def scores_of(params: Any, images: Any) -> Any:
    """A network of one hidden layer: a score for each digit."""
    return jax.nn.relu(images @ params["in"]) @ params["out"]


def trained(images: Any, labels: Any, width: int, steps: int) -> Any:
    """A network of this width, trained in this process."""
    rng = np.random.default_rng(width)
    params = {
        "in": rng.normal(0, 0.15, (64, width)).astype(np.float32),
        "out": rng.normal(0, 0.15, (width, 10)).astype(np.float32),
    }

    def loss(params: Any) -> Any:
        right = jnp.take_along_axis(jax.nn.log_softmax(scores_of(params, images)), labels[:, None], axis=1)
        return -right.mean()

    step = jax.jit(lambda params: jax.tree.map(lambda p, g: p - 1.0 * g, params, jax.grad(loss)(params)))
    for _ in range(steps):
        params = step(params)
    return jax.device_get(params)


def main() -> None:
    with pw.connect():
        quick, *others = pw.slice(1), pw.slice(1), pw.slice(1)
        first = pw.jit(quick, name="first")(scores_of)
        specialists = [pw.jit(slice, name="specialist")(scores_of) for slice in others]

        @pw.program
        def answer(models: Any, images: Any) -> Any:
            guess = first(models[0], images)
            unsure = jax.nn.softmax(guess).max(axis=-1) < SURE
            kind = jnp.isin(guess.argmax(axis=-1), jnp.asarray(ROUND)).astype(jnp.int32)

            def ask(images: Any) -> Any:
                nobody = [lambda rows: jnp.zeros((rows.shape[0], 10), rows.dtype)]  # an answer that nobody needs
                calls = [lambda rows, s=s, m=m: s(m, rows) for s, m in zip(specialists, models[1:], strict=True)]
                chosen = jnp.where(unsure, kind, len(calls))
                better = pw.route(images, chosen, unsure.astype(images.dtype), calls + nobody)
                return jnp.where(unsure[:, None], better, guess)

            return pw.cond(unsure.any(), ask, lambda images: guess, images).argmax(axis=-1), unsure.sum()

        digits = load_digits()
        images, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int32)
        train, held_out = slice(0, -128), slice(-128, None)
        is_round = np.isin(labels[train], ROUND)
        models = [
            pw.put(trained(images[train], labels[train], 8, 100), quick),
            pw.put(trained(images[train][~is_round], labels[train][~is_round], 64, 500), others[0]),
            pw.put(trained(images[train][is_round], labels[train][is_round], 64, 500), others[1]),
        ]
        for batch in np.split(images[held_out], 4):
            with pw.record_steps() as recording:
                answers, asked = answer(models, batch)
                answers = np.asarray(answers)
            ran = sum("specialist" in step.label for step in recording.steps)
            print(f"{int(asked):2} of {len(batch)} digits went on, to {ran} specialists")
        alone = np.asarray(first(models[0], images[held_out])).argmax(axis=-1)
        together = np.concatenate([np.asarray(answer(models, b)[0]) for b in np.split(images[held_out], 4)])
        truth = labels[held_out]
        print(
            f"right: {(alone == truth).mean():.0%} by the small model alone, {(together == truth).mean():.0%} together"
        )
        easy = images[held_out][np.abs(jax.nn.softmax(np.asarray(first(models[0], images[held_out]))).max(-1)) >= SURE]
        with pw.record_steps() as recording:
            answers, asked = answer(models, np.repeat(easy[:1], 32, axis=0))
            answers.block_until_ready()
        assert not any("specialist" in step.label for step in recording.steps)
        print(f"{int(asked)} of 32 easy digits went on: no specialist ran")


if __name__ == "__main__":
    main()

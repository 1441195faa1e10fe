"""A Llama-style decoder-only language model in plain JAX: pytrees in, arrays out, no framework, no slices.

RMSNorm before each half of a block, rotary position embeddings, grouped-query attention, SwiGLU; no biases. The
embedding also reads out, where `tied`. `stages` cuts the model for a pipeline; `specs` splits it over a mesh axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pathway.errors import ConfigError

Tree = Any


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's shape."""

    vocabulary: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 352
    context: int = 128
    tied: bool = True
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or self.width // self.heads % 2:
            raise ConfigError(
                f"a model of width {self.width} cannot have {self.heads} heads and {self.kv_heads} heads for keys and "
                "values: heads divide the width into even parts, and key heads divide heads"
            )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def parameters(self) -> int:
        """How many numbers it has."""
        return sum(int(np.prod(shape)) for shape in jax.tree.leaves(_shapes(self), is_leaf=_is_shape))

    def flops_per_token(self) -> float:
        """Of a training step, forward and backward: 6 for each weight that multiplies, and attention's products."""
        embedding = 0 if self.tied else self.vocabulary * self.width
        return 6 * (self.parameters() - embedding) + 12 * self.layers * self.width * self.context


def init(config: Config, seed: int = 0) -> Tree:
    """Random parameters, on the host."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        scale = 0.02
        if path[-1].key in ("out", "down"):  # what is added to the residual stream: less the deeper the model is
            scale /= np.sqrt(2 * config.layers)
        return rng.normal(0, scale, shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, _shapes(config), is_leaf=_is_shape)


def _shapes(config: Config) -> Tree:
    width, hidden, keys = config.width, config.hidden, config.kv_heads * config.head_width
    block = {
        "attention_norm": (width,),
        "query": (width, width),
        "key": (width, keys),
        "value": (width, keys),
        "out": (width, width),
        "mlp_norm": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    shapes: dict[str, Any] = {"embedding": (config.vocabulary, width), "layers": [dict(block)] * config.layers}
    shapes["norm"] = (width,)
    if not config.tied:
        shapes["head"] = (config.vocabulary, width)
    return shapes


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple)


def specs(config: Config, axis: str = "model") -> Tree:
    """Tensor parallel over one mesh axis: heads and hidden units are split; XLA adds up after `out` and `down`."""
    columns, rows = P(None, axis), P(axis, None)
    block = {
        "attention_norm": P(),
        "query": columns,
        "key": columns,
        "value": columns,
        "out": rows,
        "mlp_norm": P(),
        "gate": columns,
        "up": columns,
        "down": rows,
    }
    whole: dict[str, Any] = {"embedding": P(), "layers": [dict(block) for _ in range(config.layers)], "norm": P()}
    return whole if config.tied else {**whole, "head": P()}


def rms_norm(scale: Any, x: Any, epsilon: float) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def rotated(x: Any, theta: float) -> Any:
    """Rotary position embedding of (batch, position, head, feature)."""
    positions, half = x.shape[1], x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(positions, dtype=jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(params: Tree, x: Any, config: Config) -> Any:
    """Causal; every key and value head serves `heads / kv_heads` query heads."""
    batch, positions, _ = x.shape
    groups = config.heads // config.kv_heads

    def split(y: Any, heads: int) -> Any:
        return y.reshape(batch, positions, heads, config.head_width)

    query = rotated(split(x @ params["query"], config.heads), config.rope_theta)
    key = rotated(split(x @ params["key"], config.kv_heads), config.rope_theta)
    value = split(x @ params["value"], config.kv_heads)
    query = query.reshape(batch, positions, config.kv_heads, groups, config.head_width)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key) / np.sqrt(config.head_width)
    seen = jnp.tril(jnp.ones((positions, positions), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(batch, positions, -1) @ params["out"]


def block(params: Tree, x: Any, config: Config) -> Any:
    x = x + attention(params, rms_norm(params["attention_norm"], x, config.norm_epsilon), config)
    h = rms_norm(params["mlp_norm"], x, config.norm_epsilon)
    return x + (jax.nn.silu(h @ params["gate"]) * (h @ params["up"])) @ params["down"]


def embed(params: Tree, tokens: Any) -> Any:
    return params["embedding"][tokens]


def read_out(params: Tree, x: Any, config: Config) -> Any:
    weights = params["embedding"] if config.tied else params["head"]
    return rms_norm(params["norm"], x, config.norm_epsilon) @ weights.T


def logits(params: Tree, tokens: Any, config: Config) -> Any:
    """(batch, position, vocabulary): of each position what comes next."""
    x = embed(params, tokens)
    for layer in params["layers"]:
        x = block(layer, x, config)
    return read_out(params, x, config)


def cross_entropy(scores: Any, targets: Any) -> Any:
    """The mean, in nats a token."""
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(scores), targets[..., None], axis=-1)
    return -likelihood.mean()


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the model: `run(pick(params), x)`."""

    run: Callable[[Tree, Any], Any]
    pick: Callable[[Tree], Tree]


def stages(config: Config, layers: Sequence[Sequence[int]]) -> list[Stage]:
    """The model in stages of these layers; the embedding is in the first, the read-out in the last."""
    if [number for some in layers for number in some] != list(range(config.layers)):
        raise ConfigError(f"{[list(some) for some in layers]} are not the {config.layers} layers in order")
    return [
        _stage(config, list(some), first=number == 0, last=number == len(layers) - 1)
        for number, some in enumerate(layers)
    ]


def _stage(config: Config, layers: list[int], *, first: bool, last: bool) -> Stage:
    names = ["embedding"] if first or (last and config.tied) else []
    names += ["norm"] if last else []
    names += ["head"] if last and not config.tied else []

    def pick(params: Tree) -> Tree:
        return {name: params[name] for name in names} | {"layers": [params["layers"][number] for number in layers]}

    def run(params: Tree, x: Any) -> Any:
        x = embed(params, x) if first else x
        for layer in params["layers"]:
            x = block(layer, x, config)
        return read_out(params, x, config) if last else x

    return Stage(run, pick)

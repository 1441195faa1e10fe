"""A JAX process that does what a test tells it, line by line: python -m tests.proxy_client. See `JaxProcess`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]


def client_environment(proxy: str, tmp: Path) -> dict[str, str]:
    """The environment in which a JAX program uses the proxy. JAX finds the plugin of an installed Pathway by its entry
    point, and the one in this tree by this namespace package."""
    plugins = tmp / "plugins" / "jax_plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    (plugins / "pathway_proxy.py").write_text("from pathway.jax_plugin import initialize\n")
    return {
        **os.environ,
        "JAX_PLATFORMS": "proxy,cpu",
        "JAX_BACKEND_TARGET": proxy,
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(plugins.parent)]),
    }


class RemoteFailure(Exception):
    """What the process raised: "JaxRuntimeError: DATA_LOSS: ..."."""


class JaxProcess:
    """`run(code)` runs statements there, and returns the value of the last, an expression, as JSON has it."""

    def __init__(self, proxy: str, tmp: Path, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.proxy_client"],
            env=client_environment(proxy, tmp) | environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(tmp / "client-errors").open("w"),
            text=True,
        )

    def run(self, code: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait(5)}"
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteFailure(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def main() -> None:
    import ast

    names: dict[str, Any] = {}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the program prints is not an answer
    exec("import jax, jax.numpy as jnp, numpy as np; from jax.sharding import *; P = PartitionSpec", names)
    for line in sys.stdin:
        tree = ast.parse(json.loads(line))
        answer: dict[str, Any] = {"value": None}
        try:
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<test>", "exec"), names)
            if isinstance(last, ast.Expr):
                answer["value"] = eval(compile(ast.Expression(last.value), "<test>", "eval"), names)
            encoded = json.dumps(
                answer, default=lambda value: value.tolist() if hasattr(value, "tolist") else repr(value)
            )
        except BaseException as error:
            encoded = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(encoded + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

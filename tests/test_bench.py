"""The benches' own machinery: what they print, how they measure, and that the device wait is what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bench import dispatch
from bench.harness import KEYS, Goal, calibrated_calls, interleaved_medians, report
from bench.leftovers import Watched
from bench.subject import REPOSITORY, Subject, SubjectError

# -- harness ----------------------------------------------------------------------------------------------------------


def test_a_result_is_one_json_line_with_exactly_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    report("b", "c", 123456.0, "1/s", rival="r", rival_value=100_000.0, goal=Goal("ratio", ">=", 1.2))
    line = json.loads(capsys.readouterr().out)
    assert tuple(line) == KEYS
    assert line["value"] == 123500.0
    assert (line["ratio"], line["goal"], line["met"]) == (1.235, "ratio >= 1.2", True)


def test_met_is_null_where_nothing_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    report("b", "c", 1.0, "s")
    line = json.loads(capsys.readouterr().out)
    assert [line[key] for key in ("rival", "rival_value", "ratio", "goal", "met")] == [None] * 5


def test_what_was_not_found_does_not_meet_its_goal(capsys: pytest.CaptureFixture[str]) -> None:
    report("b", "c", None, "us", goal=Goal("value", "<=", 200))
    assert json.loads(capsys.readouterr().out)["met"] is False


def test_measures_take_turns_and_their_medians_are_per_call() -> None:
    turns: list[str] = []

    def measure(name: str, call_s: float) -> Any:
        def run(calls: int) -> float:
            turns.append(name)
            return calls * call_s

        return run

    medians = interleaved_medians({"a": measure("a", 0.5), "b": measure("b", 0.25)}, rounds=3, round_s=1.0)
    assert medians == {"a": 0.5, "b": 0.25}
    assert turns[-6:] == ["a", "b"] * 3


def test_calibration_ends_near_the_wanted_time() -> None:
    assert calibrated_calls(lambda calls: calls * 1e-4, 1.0) in range(5_000, 10_001)


# -- subjects ---------------------------------------------------------------------------------------------------------

CHILD = """
import os, sys
from bench.subject import serve
def echo(x): print("noise on stdout"); return x
def fail(): raise ValueError("on purpose")
serve({"echo": echo, "fail": fail, "die": lambda: os._exit(3), "pid": os.getpid})
"""


def test_subjects_answer_whatever_their_libraries_print_and_say_why_they_fail() -> None:
    command = [sys.executable, "-c", CHILD]
    with Subject("child", [command, command]) as subject:
        assert subject.ask("echo", x=[1, 2]) == [1, 2]
        with pytest.raises(SubjectError, match="ValueError: on purpose"):
            subject.ask("fail")
        with pytest.raises(SubjectError, match="exit code 3"):
            subject.ask("die")


def test_watched_finds_a_child_whose_parent_is_gone() -> None:
    watched = Watched()
    parent = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid)"
    started = subprocess.run(
        [sys.executable, "-c", parent], env=watched.environment, stdout=subprocess.PIPE, text=True, check=True
    )
    orphan = int(started.stdout)
    try:
        assert watched.leftovers() == [f"process {orphan}: sleep 60 "]
    finally:
        subprocess.run(["kill", "-9", str(orphan)], check=True)
        watched.close()


# -- dispatch ---------------------------------------------------------------------------------------------------------


class FakeSubject:
    """Answers at once, with fixed times: raw JAX needs 100 us a call and the wait, the others 130 us or the wait."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ask(self, do: str, *, calls: int, case: str = "", wait_us: int = 0) -> Any:
        call_s = (100 + wait_us if self.name == dispatch.RAW else max(130, 101 + wait_us)) * 1e-6
        return [call_s] * calls if do == "blocking" else calls * call_s


def test_every_promise_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    subjects: Any = {name: FakeSubject(name) for name in (dispatch.OURS, dispatch.RAW, "ray")}
    for shape in (dispatch.ONE_DEVICE, dispatch.FOUR_DEVICES, dispatch.TWO_HOSTS):
        dispatch.figure_5(shape, subjects, dispatch.QUICK)
        dispatch.figure_6(shape, subjects, dispatch.QUICK)
    dispatch.blocking_call(dispatch.ONE_DEVICE, subjects, dispatch.QUICK)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    promised = {(f"{case} {shape}", rival) for case, shape, rival in dispatch.GOALS}
    assert promised == {(line["case"], line["rival"]) for line in lines if line["goal"]}
    shortest = next(line for line in lines if line["case"] == f"shortest computation {dispatch.ONE_DEVICE}")
    assert shortest["value"] == 150.0  # raw JAX's call with a wait of 50 us, the first beside which 1 us is little


# -- device wait ------------------------------------------------------------------------------------------------------

DEVICE_WAIT = """
import json, os, sys, time
os.environ |= {"NPROC": "32", "JAX_PLATFORMS": "cpu"}
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from bench.device_wait import device_wait

wait = jax.jit(lambda x: device_wait(x, 100_000) + 1)
x = [jax.device_put(np.float32(0), device) for device in jax.devices()]
compiled = [wait.lower(value).compile() for value in x]
found = {}

def timed(function):
    began, used = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - began, time.process_time() - used

pending, found["dispatch_s"], _ = timed(lambda: wait(x[0]))
pending.block_until_ready()
result, found["one_s"], found["one_cpu_s"] = timed(lambda: wait(x[0]).block_until_ready())
found["result"] = float(result)
_, found["same_device_s"], _ = timed(lambda: jax.block_until_ready([wait(x[0]) for _ in range(3)]))
wait(x[1]).block_until_ready()
_, found["two_devices_s"], _ = timed(lambda: jax.block_until_ready([wait(x[0]), wait(x[1])]))
gradient = jax.jit(jax.grad(lambda x: device_wait(x, 50_000) ** 2))
gradient(3.0)
found["gradient"], found["gradient_s"], _ = timed(lambda: float(gradient(3.0)))
print(json.dumps(found))
"""


def test_the_device_wait_holds_its_device_and_no_core() -> None:
    command = [sys.executable, "-c", DEVICE_WAIT]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["result"] == 1.0
    assert found["dispatch_s"] < 0.05, "the caller waited: the computation was run inline"
    assert found["one_s"] >= 0.1
    assert found["one_cpu_s"] < 0.02
    assert found["same_device_s"] >= 0.3, "one device did two things at a time"
    assert found["two_devices_s"] < 0.19, "two devices waited for one another"
    assert found["gradient"] == 6.0
    assert found["gradient_s"] >= 0.1, "the backward pass did not wait"


def test_the_device_wait_exports_for_a_mesh_of_other_devices() -> None:
    import jax
    import jax.numpy as jnp

    from bench.device_wait import TARGET_NAME, device_wait

    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    exported = jax.export.export(jax.jit(lambda x: device_wait(x, 10)), disabled_checks=checks)(jnp.zeros(4))
    assert TARGET_NAME in exported.mlir_module()


def test_the_target_is_built_once() -> None:
    from bench.device_wait import build

    built_ns = build().stat().st_mtime_ns
    assert build().stat().st_mtime_ns == built_ns

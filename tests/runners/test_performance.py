"""The performance runner from end to end on a CPU, under Triton's interpreter; its times say nothing there."""

from __future__ import annotations

import gc
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load

import ledger.performance
from ledger import records, validity
from ledger.errors import InputError, RefusedError
from runners import contenders, fp8, fused, geometry, oracle, performance, slots, steps, timing
from runners.contenders import Offer, Problem
from runners.pages import Pages

from . import tiny

# Places behind a sequence's end hold whatever the memory held: numpy warns of sums that the kernel's masks then drop.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CONFIG = tiny.CONFIG | {"head_dim": 64, "num_hidden_layers": 1}


def arm(name: str, implementation: str, backend: str, keys: str = "bf16", values: str = "bf16", **more: Any) -> records.Arm:
    role = "control" if implementation == "native" else "candidate"
    given = {"name": name, "role": role, "implementation": implementation, "compute": "bf16", "backend": backend}
    return records.convert(records.Arm, given | {"keys": keys, "values": values} | more, "arm")


NATIVES = (
    arm("sdpa-flash", "native", "sdpa:flash"),
    arm("sdpa-efficient", "native", "sdpa:efficient"),
    arm("sdpa-math", "native", "sdpa:math"),
    arm("flashinfer", "native", "flashinfer"),
    arm("flashinfer-e4m3", "native", "flashinfer", "fp8_e4m3", "fp8_e4m3", scales="unit"),
    arm("transformers", "native", "transformers"),
)
FUSED = (
    arm("k16v16", "fused", "kv_fused"),
    arm("k16v8", "fused", "kv_fused", "bf16", "fp8_e4m3", scales="unit"),
    arm("k8v8", "fused", "kv_fused", "fp8_e4m3", "fp8_e4m3", scales="dynamic", granularity="token_head"),
)
CASES = (
    records.Case(kind="decode", batch=2, context=24, shortest=5, head_dim=64),
    records.Case(kind="decode", batch=2, context=24, head_dim=64, window=10, soft_cap=30.0),
    records.Case(kind="append", batch=2, context=17, head_dim=64),
    records.Case(kind="write", batch=1, context=20, head_dim=64),
    records.Case(kind="prefill", batch=1, context=32, chunk=16, head_dim=64),
    records.Case(kind="step", batch=2, context=24),
    records.Case(kind="capacity", batch=1, context=64),
)
REPEATS = 2
FIXED = {"scales": "fixed", "granularity": "head", "scale_source": "0" * 64}


def spec(cases: tuple[records.Case, ...] = CASES, arms: tuple[records.Arm, ...] = (*NATIVES, *FUSED), **changes: Any) -> records.Spec:
    settings = {"repeats": REPEATS, "launches": 2, "rotate_bytes": 20_000, "budget_bytes": 400_000, "page": 16, "seed": 3}
    own = {name: changes.pop(name) for name in list(changes) if name in settings}
    fields: dict[str, Any] = {
        "format": "kv-ledger/spec/2",
        "study": "tiny-performance",
        "title": "Times of a tiny model",
        "scope": "performance",
        "checkpoint": records.Checkpoint(name="tiny", source="random:llama#7", license="CC0-1.0", config=CONFIG, seed=7),
        "workload": None,
        "arms": arms,
        "contrasts": (),
        "families": (),
        "performance": records.Performance(cases=cases, **settings | own),
    }
    return records.Spec(**fields | changes)


def run(frozen: records.Spec) -> tiny.Kept:
    kept = tiny.Kept()
    performance.run(frozen, Path("nowhere"), kept, kept)
    return kept


def lines(kept: tiny.Kept) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["case"], line["arm"]): line for line in map(json.loads, kept.files["cases.jsonl"].splitlines())}


@pytest.fixture(scope="module")
def standard() -> tiny.Kept:
    return run(spec())


# ---------------------------------------------------------------- what is compiled before anything is timed


def test_every_kernel_that_cases_launch_is_launched_before_and_over_fewer_tokens(monkeypatch):
    launched: list[tuple[str, tuple[int, ...], int]] = []

    def kernel(name: str) -> Any:
        def launch(*given: Any, **options: Any) -> torch.Tensor:
            states = given[0 if name != "write" else 1]
            launched.append((name, tuple(states.shape), options.get("window", 0)))
            return torch.zeros_like(states)

        return launch

    fake = SimpleNamespace(**{name: kernel(name) for name in ("write", "decode", "prefill")}, Plan=tiny.NoPlan)
    monkeypatch.setattr(geometry, "kernels", lambda: fake)
    sizes = {"head_dim": 64, "batch": 2}
    cases = (
        records.Case(kind="decode", context=64, **sizes),
        records.Case(kind="decode", context=8192, **sizes),
        records.Case(kind="decode", context=4096, **sizes | {"batch": 3}),
        records.Case(kind="decode", context=32768, shortest=128, window=10, **sizes),
        records.Case(kind="append", context=8192, **sizes),
        records.Case(kind="write", context=8192, **sizes),
        records.Case(kind="prefill", context=8192, chunk=2048, **sizes),
        *CASES[-2:],
    )
    bench = performance.Bench(spec(cases), Path("nowhere"), tiny.Kept())
    bench.compile_ahead()
    alone = {one for one in launched if one[0] != "write"}
    assert alone == {
        ("decode", (2, 4, 64), 0), ("decode", (2, 4, 64), 10), ("prefill", (2, 256, 4, 64), 0),
    }  # fmt: skip
    assert {one[1][1] for one in launched if one[0] == "write"} == {1, 64, 1024}
    assert bench.lines[1:] == []  # nothing of it is told


def test_what_fails_to_compile_ahead_is_told_by_its_case(monkeypatch):
    def stop(*given: Any, **options: Any) -> None:
        raise RuntimeError("the compiler stopped")

    bench = performance.Bench(spec(CASES[:1]), Path("nowhere"), tiny.Kept())
    monkeypatch.setattr(fused, "write", stop)
    bench.compile_ahead()


# ---------------------------------------------------------------- what a run leaves


def test_every_arm_that_takes_part_in_a_case_has_a_line_and_either_samples_or_a_refusal(standard):
    found = lines(standard)
    samples = [load(data) for name, data in sorted(standard.files.items()) if name.startswith("timings/")]
    assert len(samples) == len(CASES) and all(np.isfinite(one["copy|"]).all() for one in samples)
    expected = {("copy", "")}
    for case, timed in zip(CASES, samples, strict=True):
        for one in (*NATIVES, *FUSED):
            if not ledger.performance.takes_part(one, case):
                continue
            expected.add((case.name, one.name))
            line, key = found[case.name, one.name], f"{case.name}|{one.name}"
            assert bool(line["refused"]) or (bool(line["kernel"]) and line["bytes"] > 0)
            assert (key in timed) == (not line["refused"] and case.kind != "capacity")
            if case.kind == "step" and one.implementation == "fused":
                assert line["kernel"].startswith("eager step: fused decode") and line["kernel"].endswith(", streamlined")
            if key in timed:
                assert timed[key].dtype == np.float64 and timed[key].shape == (REPEATS,) and (timed[key] > 0).all()
    assert set(found) == expected


def test_the_archive_derives_its_figures_from_what_the_runner_wrote(standard):
    frozen = spec()
    timings = ledger.performance.read(frozen, standard.files)
    names = {one.name for one in ledger.performance.measure(frozen, timings)}
    for group in ("decode/k16v8/b2/c5-24/d64", "append/k8v8/b2/c17/d64", "prefill/k16v16/b1/c32/d64/q16", "step/tiny/k16v8/b2/c24"):
        assert {f"{group}/{figure}" for figure in ("median_us", "spread_us", "share_of_copy")} <= names
        assert (f"{group}/ratio_to_best_native" in names) == (not group.startswith("append/"))  # no native contender appends
    assert "step/tiny/transformers/b2/c24/median_us" in names and "capacity/k16v8/b1/c64/ratio" in names


def test_every_arm_did_what_was_asked_and_says_so_in_its_facts(standard):
    for result in standard.fields["arms"]:
        one = next(one for one in (*NATIVES, *FUSED) if one.name == result.name)
        refused = one.backend in ("sdpa:efficient", "flashinfer")  # neither runs on a CPU
        assert result.outcome == ("refused" if refused else "completed"), result.reason
        assert refused or validity.contradictions(one, result) == []
        assert refused == (not any(backend.accepted for backend in result.backends))


def test_a_refusal_is_kept_in_the_words_of_the_backend(standard):
    found, case = lines(standard), CASES[0].name
    assert "FlashInfer needs a CUDA device" in found[case, "flashinfer"]["refused"]
    assert "No viable backend" in found[case, "sdpa-efficient"]["refused"]
    assert found[CASES[1].name, "sdpa-flash"]["refused"].startswith("logit_softcap: SDPA has no soft cap.")
    flash = next(one for one in standard.fields["arms"] if one.name == "sdpa-flash")
    assert any("varlen" in backend.reason and not backend.accepted for backend in flash.backends)


@pytest.mark.parametrize("case", [case for case in CASES if case.kind in ("decode", "prefill")], ids=lambda case: case.name)
def test_errors_are_those_of_the_formats(standard, case):
    found = lines(standard)
    for name, beyond in (("k16v16", 0.0), ("k16v8", 0.01), ("k8v8", 0.02)):
        line = found[case.name, name]
        assert 0 < line["relative_error"] < 0.01
        assert beyond < line["relative_error_unquantised"] < beyond + 0.03
    native = found[case.name, "sdpa-math"]
    assert native["refused"] or native["relative_error"] == native["relative_error_unquantised"] < 0.005


def test_what_is_written_is_what_torch_quantises_bit_for_bit(standard):
    found = lines(standard)
    for case in CASES[2:4]:
        for one in FUSED:
            assert found[case.name, one.name]["relative_error"] == 0
        assert found[case.name, "k16v16"]["relative_error_unquantised"] == 0 < found[case.name, "k16v8"]["relative_error_unquantised"]


def test_capacity_is_counted_in_a_pool_that_was_filled(standard):
    found, case = lines(standard), CASES[-1].name
    tokens = {one.name: found[case, one.name]["tokens"] for one in FUSED}
    assert tokens["k16v16"] < tokens["k16v8"] < tokens["k8v8"]
    assert all(found[case, one.name]["bytes"] <= 400_000 for one in FUSED)
    # A page of K16/V8 has 3/4 of the bytes, whole pages aside.
    assert abs(tokens["k16v8"] - tokens["k16v16"] * 4 / 3) <= 2 * 16


def test_nothing_is_said_to_be_effective_that_only_was_asked_for(standard):
    for result in standard.fields["arms"]:
        assert not result.effective or result.name == "transformers"
    assert "implementation" not in standard.arm("transformers").effective


@pytest.mark.parametrize("one", [FUSED[2], arm("fixed", "fused", "kv_fused", "bf16", "fp8_e4m3", **FIXED)], ids=lambda one: one.name)
def test_the_facts_of_a_capacity_are_those_of_the_pool(one):
    config = CONFIG | {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    checkpoint = records.Checkpoint(name="tiny", source="random:gemma3_text#7", license="CC0-1.0", config=config, seed=7)
    result = run(spec(cases=CASES[-1:], arms=(NATIVES[0], one), checkpoint=checkpoint)).arm(one.name)
    assert result.outcome == "completed" and not result.effective and validity.contradictions(one, result) == []
    assert result.measured == {name: getattr(one, name) for name in ("keys", "values", "scales", "granularity")}
    assert [(layer.kind, layer.window, layer.key_dim) for layer in result.geometry.measured] == [
        ("sliding", 8, 64),
        ("attention", None, 64),
    ]


def test_the_same_spec_gives_the_same_numbers_to_time():
    bench, other = (performance.Bench(spec(), Path("nowhere"), tiny.Kept()) for _ in range(2))
    first, second = (each._problem(0, CASES[0], each.layers[0]) for each in (bench, other))
    assert first.lengths == second.lengths and all(5 <= length <= 24 for length in first.lengths)
    assert torch.equal(first.keys, second.keys) and not torch.equal(first.keys, first.values)
    least = min(slots.stored_bytes(one, bench.layers[0], sum(first.lengths)) for one in FUSED)
    assert (first.slots - 1) * least < 20_000 <= first.slots * least  # buffers rotate


def test_contenders_are_free_to_use_any_algorithm_and_the_setting_comes_back(monkeypatch):
    seen = []
    monkeypatch.setattr(performance.Bench, "case", lambda *args: seen.append(torch.are_deterministic_algorithms_enabled()) or {})
    torch.use_deterministic_algorithms(True)
    try:
        run(spec(cases=CASES[:1]))
        assert seen == [False] and torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------- what cannot be, and what goes wrong


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cases": (records.Case(kind="decode", batch=1, context=8, head_dim=128),)}, "head dimension 64"),
        ({"arms": (tiny.arm("wide", "control", "fp32", "fp32", implementation="native"), *FUSED)}, "one 16-bit dtype"),
        ({"performance": None}, "nothing of what to time"),
        ({"checkpoint": records.Checkpoint(name="t", source="random:no-model#1", license="", config=CONFIG, seed=1)}, "cannot be read"),
    ],
)
def test_what_cannot_be_timed_is_an_error_before_anything_is(changes, words):
    with pytest.raises(InputError, match=words):
        run(spec(**changes))


def test_a_case_that_does_not_fit_the_memory_is_refused_with_the_numbers_and_the_next_one_runs(monkeypatch):
    def too_large(*args: Any) -> Problem:
        raise torch.OutOfMemoryError("Tried to allocate 128.00 GiB. GPU 0 has a total capacity of 139.80 GiB")

    monkeypatch.setattr(performance.Bench, "_problem", too_large)
    kept = run(spec(cases=(CASES[0], CASES[2]), arms=(NATIVES[0], FUSED[0])))
    found = lines(kept)
    for name in ("sdpa-flash", "k16v16"):
        assert found[CASES[0].name, name]["refused"].startswith("memory: Tried to allocate 128.00 GiB")
    assert not found[CASES[2].name, "k16v16"]["refused"]
    assert [one.outcome for one in kept.fields["arms"]] == ["refused", "completed"]


def test_a_fault_of_the_kernels_is_a_failure_and_ends_that_arm_alone(monkeypatch):
    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("an illegal instruction")

    monkeypatch.setattr(fused, "decode", broken)
    kept = run(spec(cases=CASES[:1], arms=(NATIVES[2], FUSED[0])))
    assert kept.arm("sdpa-math").outcome == "completed"
    assert kept.arm("k16v16").outcome == "failed" and "ValueError: an illegal instruction" in kept.arm("k16v16").reason


def test_a_native_contender_that_computes_something_else_does_not_count(monkeypatch):
    def zeros(backend: str, problem: Problem, stored: str) -> list[Offer]:
        return [Offer("zeros", lambda: lambda slot: torch.zeros_like(problem.queries[slot, :, 0]))]

    monkeypatch.setattr(contenders, "offers", zeros)
    kept = run(spec(cases=CASES[:1], arms=(NATIVES[2], FUSED[0])))
    assert "relative error 1" in lines(kept)[CASES[0].name, "sdpa-math"]["refused"]


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError, ImportError, torch.OutOfMemoryError])
def test_an_error_of_a_library_is_a_refusal(monkeypatch, error):
    kept = run_offers(monkeypatch, lambda problem: fail(error("the library's words")))
    assert kept.arm("sdpa-math").outcome == "refused" and "the library's words" in kept.arm("sdpa-math").reason


@pytest.mark.parametrize("error", [TypeError, AttributeError, IndexError, InputError])
def test_any_other_error_of_a_contender_fails_its_arm(monkeypatch, error):
    kept = run_offers(monkeypatch, lambda problem: fail(error("run() got an unexpected argument")))
    assert kept.arm("sdpa-math").outcome == "failed" and "unexpected argument" in kept.arm("sdpa-math").reason
    assert not kept.arm("sdpa-math").backends and kept.arm("k16v16").outcome == "completed"


def fail(error: Exception) -> Any:
    raise error


def run_offers(monkeypatch: pytest.MonkeyPatch, *prepares: Any) -> tiny.Kept:
    """A decode case whose native backend makes these offers, ``offer 0`` and so on."""

    def offers(backend: str, problem: Problem, stored: str) -> list[Offer]:
        return [Offer(f"offer {number}", lambda each=each: each(problem)) for number, each in enumerate(prepares)]

    monkeypatch.setattr(contenders, "offers", offers)
    return run(spec(cases=CASES[:1], arms=(NATIVES[2], FUSED[0])))


def test_the_fastest_offer_is_chosen_by_replays_and_not_by_its_first_launches(monkeypatch):
    given = contenders.offers

    def right(problem: Problem, late: float, early: float) -> Any:
        launch, calls = given("sdpa:math", problem, "bf16")[0].prepare(), [0]

        def slow(slot: int) -> torch.Tensor:
            calls[0] += 1
            time.sleep(early if calls[0] <= 2 else late)
            return launch(slot)

        return slow

    kept = run_offers(monkeypatch, lambda one: right(one, 0.05, 0.0), lambda one: right(one, 0.0, 0.05))
    assert lines(kept)[CASES[0].name, "sdpa-math"]["kernel"].startswith("offer 1")


def test_a_sample_that_does_not_come_to_every_slot_says_so(monkeypatch):
    monkeypatch.setattr(timing, "LONGEST_US", 1.0)
    kept = run(spec(cases=(CASES[0], CASES[2]), arms=(NATIVES[2], FUSED[0])))
    found = lines(kept)
    for case, name in ((CASES[0], "sdpa-math"), (CASES[0], "k16v16"), (CASES[2], "k16v16")):
        line = found[case.name, name]
        assert line["launches"] == 1 and re.search(r", 1 of \d+ slots a sample$", line["kernel"])


def test_kernels_that_cannot_run_here_are_refused_with_the_code_device(monkeypatch):
    monkeypatch.setattr(fused, "available", lambda device: "no Triton")
    kept = run(spec(cases=CASES[:1], arms=(NATIVES[2], FUSED[0])))
    assert kept.arm("k16v16").outcome == "refused" and kept.arm("k16v16").reason.startswith("device: ")


# ---------------------------------------------------------------- contenders


def problem(lengths: tuple[int, ...], window: int = 0, chunk: int = 0, dtype: torch.dtype = torch.float32) -> Problem:
    """Two slots, 4 query heads on 2 KV heads of 16."""
    generator, longest = torch.Generator().manual_seed(1), max(lengths)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, len(lengths), *shape, generator=generator).to(dtype)

    queries = normal(longest if chunk else 1, 4, 16)
    return Problem(queries, normal(2, longest, 16), normal(2, longest, 16), lengths, 0.25, window=window, chunk=chunk)


def expected(given: Problem, slot: int) -> torch.Tensor:
    """The oracle's attention over the problem's states: [B, H_q, D] of decode, [B, chunk, H_q, D] of prefill's last chunk."""
    found = []
    for row, length in enumerate(given.lengths):
        first = given.longest - length
        pages = Pages(given.keys[slot, row, None, :, first:], given.values[slot, row, None, :, first:])
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length])
        queries = given.queries[slot, row, None, -(given.chunk or 1) :]
        found.append(oracle.prefill(queries, pages, table, lengths, scale=given.scale, window=given.window))
    return torch.cat(found) if given.chunk else torch.cat(found)[:, 0]


@pytest.mark.parametrize("backend", ["sdpa:math", "sdpa:flash"])
@pytest.mark.parametrize(
    "given",
    [
        problem((9, 9)),
        problem((9, 9), window=4),
        problem((9, 3)),
        problem((9, 3), window=4),
        problem((12, 12), chunk=4),
        problem((12, 12), chunk=4, window=5),
        problem((12, 12), chunk=12),
    ],
    ids=["equal", "window", "mixed", "mixed, window", "prefill", "prefill, window", "one chunk"],
)
def test_every_offer_of_sdpa_is_that_very_attention(backend, given):
    ran = []
    for offer in contenders.offers(backend, given, "bf16"):
        if "varlen" in offer.kernel:  # torch has it on a GPU alone
            continue
        launch = offer.prepare()
        for slot in range(2):
            torch.testing.assert_close(launch(slot), expected(given, slot), atol=2e-6, rtol=2e-5)
        ran.append(offer.kernel)
    assert len(ran) == 2


@pytest.mark.parametrize("stored", ["bf16", "fp8_e4m3"])
@pytest.mark.parametrize("page", contenders.PAGE_SIZES)
def test_pages_for_flashinfer_hold_the_states_where_its_plan_says(stored, page):
    given = problem((37, 16, 130), dtype=torch.bfloat16)
    keys, values, order, starts = contenders.paged(given, page, stored)
    assert sorted(order) == list(range(len(order))) and starts[-1] == len(order) and order != sorted(order)
    assert keys.dtype == (fp8.E4M3 if stored == "fp8_e4m3" else torch.bfloat16)
    for side, states in ((keys, given.keys), (values, given.values)):
        for row, length in enumerate(given.lengths):
            places = order[starts[row] : starts[row + 1]]
            held = side.float()[1, places].transpose(0, 1).flatten(1, 2)[:, :length]
            wanted = states[1, row, :, given.longest - length :].float()
            torch.testing.assert_close(held, wanted, atol=1e-3, rtol=0.07 if stored == "fp8_e4m3" else 0)


@pytest.mark.parametrize(
    ("backend", "stored", "changes", "code"),
    [
        ("sdpa:math", "fp8_e4m3", {}, "dtype"),
        ("flashinfer:cuda-cores", "bf16", {"chunk": 3}, "backend"),
        ("flashinfer", "fp8_e4m3", {"chunk": 3}, "dtype"),
        ("flashinfer", "bf16", {"chunk": 3}, "backend"),
        ("somebody", "bf16", {}, "backend"),
    ],
)
def test_what_a_backend_does_not_do_is_refused_with_a_code(backend, stored, changes, code):
    with pytest.raises(RefusedError) as caught:
        contenders.offers(backend, problem((9, 9), **changes), stored)
    assert caught.value.code == code


# ---------------------------------------------------------------- steps and the clock


def test_every_choice_of_attention_makes_the_same_native_step_over_a_full_static_cache():
    bench = performance.Bench(spec(), Path("nowhere"), tiny.Kept())
    with torch.inference_mode():
        native = steps.Native(bench.model(), 2, 24, 5, torch.device("cpu"))
        found = []
        for choice in steps.CHOICES:
            native.ready(choice, bench.clock)()
            found.append(native.step())
            assert [int(length) for length in native.lengths] == [23]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["gemma3", "gemma4-unified"])
def test_a_full_window_slides_as_in_transformers_and_makes_no_index_on_the_host(name, monkeypatch):
    model, device = tiny.model(name, torch.bfloat16), torch.device("cpu")
    with torch.inference_mode():
        own, other = (steps.Native(model, 2, 24, 5, device) for _ in range(2))
        windows = [layer for layer in other.cache.layers if "update" in vars(layer)]
        assert len(windows) == 3 and {layer.max_cache_len for layer in windows} == {8}
        for layer in windows:
            del layer.update
        expected = other.step()
        made = torch.tensor
        monkeypatch.setattr(torch, "tensor", lambda data, **more: pytest.fail("made on the host") if data == [-1] else made(data, **more))
        assert torch.equal(own.step(), expected)
    for one, two in zip(own.cache.layers, other.cache.layers, strict=True):
        assert torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)


def test_the_bytes_of_a_step_are_its_weights_and_what_it_attends_to():
    bench = performance.Bench(spec(), Path("nowhere"), tiny.Kept())
    model = bench.model()
    weights = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    sizes = [steps.bytes_of(model, one, bench.layers, 2, 24) - weights for one in FUSED]
    assert sizes == [slots.stored_bytes(one, bench.layers[0], 48) for one in FUSED]
    assert sizes == [48 * 2 * 64 * 4, 48 * 2 * 64 * 3, 48 * 2 * (64 * 2 + 8)]


def test_a_context_that_is_shorter_than_its_steps_is_an_error():
    kept = run(spec(cases=(records.Case(kind="step", batch=1, context=5),), arms=(NATIVES[-1], FUSED[0])))
    assert "too short for the steps" in kept.arm("k16v16").reason


def test_contenders_take_turns_and_each_round_begins_with_another():
    clock, calls = timing.Clock(torch.device("cpu"), launches=8), []
    found = clock.race({name: lambda name=name: calls.append(name) for name in "abc"}, 4)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert all(values.dtype == np.float64 and values.shape == (4,) for values in found.values())


def test_a_slow_launch_is_made_less_often_and_slots_take_turns():
    clock, calls = timing.Clock(torch.device("cpu"), launches=8), []
    assert [clock.count(estimate, 3) for estimate in (1.0, 2500.0, 10_000.0, 1e9, 0.0)] == [8, 8, 2, 1, 8]
    assert clock.count(1.0, 100) == 100  # a replay comes to every slot
    clock.ready(calls.append, 3, 5)()
    assert calls == [0, 1, 2, 0, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing is captured")
@pytest.mark.parametrize("collecting", [True, False])
def test_a_capture_leaves_the_garbage_collector_as_it_was(collecting):
    (gc.enable if collecting else gc.disable)()
    try:
        timing.Clock(torch.device("cuda", 0), 1).ready(lambda slot: torch.zeros(1, device="cuda"), 1, 1)
        assert gc.isenabled() is collecting
    finally:
        gc.enable()


def test_a_copy_reads_its_bytes_once_and_writes_them_once():
    copy = timing.Copy(timing.Clock(torch.device("cpu"), 1), 4096)
    assert copy.bytes == 8192 and copy.samples(3).shape == (3,)


def test_a_native_offer_that_the_ledger_would_not_count_is_not_chosen():
    assert all(performance.WRONG[name] <= ledger.performance.MAX_ERROR for name in ("bf16", "fp16"))

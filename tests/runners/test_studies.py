from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import transformers
from safetensors.numpy import load

from ledger import dryrun, freezing, records, sources
from ledger.records import consistency
from runners import captures, checkpoints, geometry, kernelchecks, losses, memory, production, studies

from . import tiny

FOLDER = Path(str(studies.__file__)).parent
LOSSES = (
    "demo",
    "gemma3-270m-fused-loss",
    "gemma3-270m-loss",
    "gemma3-270m-loss-8k",
    "smollm2-135m-fused-decode-loss",
    "smollm2-135m-fused-loss",
    "smollm2-135m-loss",
    "smollm2-135m-loss-8k",
    "smollm2-135m-rescaled-loss",
)
PERFORMANCES = (
    "performance-gemma-3",
    "performance-gemma-3-27b",
    "performance-gemma-4-12b",
    "performance-ministral-3-8b",
    "performance-qwen2-5-7b",
    "performance-qwen3-5-9b",
    "performance-qwen3-8b",
)
CAPTURES = tuple(f"{model}-{scope}" for model in ("gemma3-270m", "smollm2-135m") for scope in ("calibration", "capability"))
MEMORIES = ("gemma3-270m-state-memory", "smollm2-135m-state-memory")
PRODUCTIONS = ("gemma3-270m-production", "smollm2-135m-production")
TASKS = ("smollm2-135m-fused-gsm8k", "smollm2-135m-gsm8k")
GRIDS = ("gemma3-270m-grid-loss", *(f"smollm2-135m-{kind}{part}" for kind in ("", "rescaled-") for part in ("grid-loss", "grid-task")))
"""Formats, scale policies and granularities; with the calibration of the positive control, those of a suite of their own."""


HUB = {
    "gemma-4-12b": ("capability", "calibration", "state-memory"),
    "gemma-4-26b-a4b": ("loss", "state-memory"),
    "ministral-3-8b": ("loss", "production", "gsm8k"),
    "qwen2-5-7b": ("loss", "production", "gsm8k"),
    "qwen3-5-9b": ("capability", "calibration", "state-memory"),
    "qwen3-8-27b": ("loss", "state-memory"),
    "qwen3-8b": ("loss", "production", "gsm8k"),
}
"""Studies of checkpoints on a hub, by model."""
HUBS = tuple(f"{model}-{kind}" for model, kinds in HUB.items() for kind in kinds)

SEEDED: dict[str, dict[str, Any]] = {
    "gemma-4-12b": {
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "sliding_window": 8,
    },
    "ministral-3-8b": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "qwen3-5-9b": {
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    },
}  # fmt: skip
"""Full-size seeded geometries, each with studies of capability and state memory, and what makes one of them tiny."""
SEEDINGS = tuple(f"{model}-seeded-{kind}" for model in SEEDED for kind in ("capability", "state-memory"))
SERVED = {
    "gemma-4-12b-seeded-production": SEEDED["gemma-4-12b"] | {"num_hidden_layers": 6, "head_dim": 64, "global_head_dim": 128},
    "qwen3-5-9b-seeded-production": SEEDED["qwen3-5-9b"] | {"head_dim": 64},
    "qwen3-8b-seeded-production": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64},
}
"""Full-size seeded geometries that are served through the fused kernels, and what makes one of them tiny."""


def study(name: str) -> dict[str, Any]:
    return freezing.load_study(name)[0]


def fed(table: dict[str, Any]) -> dict[str, Any]:
    """The workload of a study, whether or not it pins what a tokenizer makes of the text."""
    return {key: value for key, value in table["workload"].items() if key != "ids"}


def test_the_studies_that_ship_are_these():
    seeded_and_grids = (*GRIDS, "smollm2-135m-rescaled-calibration", *SEEDINGS, *SERVED)
    named = (*LOSSES, *PERFORMANCES, *PRODUCTIONS, *TASKS, *HUBS, *CAPTURES, *MEMORIES, *seeded_and_grids)
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.toml"))) == tuple(sorted(named))


@pytest.mark.parametrize("name", LOSSES)
def test_a_study_is_named_like_its_file_and_agrees_with_itself(name):
    table = study(name)
    assert table["study"] == name
    frozen = tiny.spec(
        arms=tuple(records.convert(records.Arm, arm, name) for arm in table["arms"]),
        contrasts=tuple(records.convert(records.Contrast, contrast, name) for contrast in table["contrasts"]),
    )
    families = tuple(records.convert(records.Family, {"name": key} | family, name) for key, family in table["families"].items())
    consistency.check(msgspec.structs.replace(frozen, families=families, tolerances=table["tolerances"]))


@pytest.mark.parametrize("name", HUBS)
def test_a_study_of_a_checkpoint_on_a_hub_says_what_it_asks_for_and_asks_nobody(name, monkeypatch):
    monkeypatch.setattr(sources.hub, "resolve", lambda *given: pytest.fail("the hub was asked"))
    found = dryrun.look(name)
    assert found["study"] == name
    assert found["checkpoint"]["source"].startswith("hf:") and "resolved to a commit" in found["checkpoint"]["pinned"]
    assert found["expects"]["download_bytes"] > 1 << 33
    arms = {arm["name"]: arm for arm in found["arms"]}
    assert arms["native"]["role"] == "control"
    assert found["scope"] in ("capability", "calibration") or any(arm["values"] == "fp8_e4m3" != arm["keys"] for arm in arms.values())


def test_every_model_on_a_hub_has_a_suite_that_runs_its_studies_and_its_times():
    shipped = {path.stem: dryrun.suite_of(path.stem) for path in (FOLDER / "suites").glob("*.toml")}
    assert sorted(shipped) == sorted((*HUB, "precision-and-scaling"))
    for model, suite in ((model, shipped[model]) for model in HUB):
        times = (f"performance-{model}",) if f"performance-{model}" in PERFORMANCES else ()
        assert suite.studies == (*(f"{model}-{kind}" for kind in HUB[model]), *times)


@pytest.mark.parametrize("name", LOSSES)
def test_every_arm_stands_in_a_contrast_or_repeats(name):
    table = study(name)
    compared = {contrast[side] for contrast in table["contrasts"] for side in ("candidate", "baseline")}
    assert all(arm["name"] in compared or "repeats" in arm for arm in table["arms"])


@pytest.mark.parametrize("name", (*PERFORMANCES, *PRODUCTIONS))
def test_a_study_without_a_dataset_is_named_like_its_file_and_agrees_with_itself(name):
    table = study(name)
    assert (table["study"], table["scope"], table["device"]) == (
        name,
        name.partition("-")[0] if name in PERFORMANCES else "production",
        "cuda",
    )
    parts = {part: table[part] for part in ("performance", "production") if part in table}
    if "performance" in parts:
        dims = {"head_dim": 256 if name in ("performance-gemma-3", "performance-gemma-4-12b", "performance-qwen3-5-9b") else 128}
        cases = [one for case in parts["performance"].pop("cases") for one in written_out(case, dims)]
        parts["performance"]["cases"] = cases
        assert {"kind": "decode", "batch": 32, "context": 8192, **dims} in cases  # the yardstick, without which a run is void
    frozen = records.convert(
        records.Spec,
        {
            "format": "kv-ledger/spec/2",
            "checkpoint": {name: table["checkpoint"][name] for name in ("name", "source", "license")},
            "workload": None,
            "contrasts": [],
            "families": [],
            "tolerances": table.get("tolerances", {}),
            **{part: table[part] for part in ("study", "title", "scope", "arms", "device")},
            **parts,
        },
        name,
    )
    consistency.check(frozen)


@pytest.mark.parametrize("name", (*CAPTURES, *MEMORIES))
def test_a_study_of_captures_or_memory_is_named_like_its_file_and_agrees_with_itself(name):
    table = study(name)
    scope = table["scope"]
    assert name.endswith(scope.replace(" ", "-")) and table["study"] == name
    part, kind = ("memory", records.Memory) if scope == "state memory" else ("capture", records.Capture)
    frozen = tiny.spec(
        arms=tuple(records.convert(records.Arm, arm, name) for arm in table["arms"]), contrasts=(), families=(), greedy=None,
        tolerances=table.get("tolerances", {}),
    )  # fmt: skip
    more = {"workload": None} if part == "memory" else {}
    asked = records.convert(kind, table[part], name)
    consistency.check(msgspec.structs.replace(frozen, format="kv-ledger/spec/3", scope=scope, **{part: asked}, **more))
    assert asked.budget_bytes == 16 << 30
    if part == "memory":
        assert asked.contexts == (1024, 8192, 32768)
        return
    # 32 captures, and a longest one that ends where SmolLM2's positions do
    long = 8064 if name.startswith("smollm2") else 8192
    assert (table["workload"]["documents"], table["workload"]["tokens"], asked.new_tokens) == ([16, 16], [1024, long], 128)
    if scope == "calibration":  # no token of what the studies of loss evaluate
        evaluated = [span for each in LOSSES for span in freezing.draft_of(study(each)).documents]
        mine = freezing.draft_of(table).documents
        first, last = mine[0].start, mine[-1].start + mine[-1].tokens
        assert all(span.start + span.tokens <= first or span.start >= last for span in evaluated)


@pytest.mark.parametrize("name", SEEDINGS)
def test_a_seeded_study_has_the_full_size_geometry_and_makes_no_claim_of_quality(name):
    draft = freezing.draft_of(study(name))
    model, _, kind = name.partition("-seeded-")
    assert (draft.study, draft.scope, draft.device) == (name, kind.replace("-", " "), "cuda")
    assert "seeded weights, no quality claim" in draft.title and "nothing of its quality" in study(name)["expects"]["validates"]
    seeded = seeded_checkpoint(study(name)["checkpoint"])
    assert seeded.synthetic
    made, _ = checkpoints.load(seeded, "bf16", device="meta")  # no byte of it is allocated
    found = [(layer.kind, layer.kv_heads, layer.key_dim, layer.value_dim, layer.window) for layer in geometry.declared(made.config)]
    expected = {  # protocols: layers, KV heads, head dimensions, windows, states
        "qwen3-5-9b": (9, ["recurrent"] * 3 + ["attention"], {("attention", 4, 256, 256, None): 8, ("recurrent", 32, 128, 128, None): 24}),
        "gemma-4-12b": (12, ["sliding"] * 5 + ["attention"], {("sliding", 8, 256, 256, 1024): 40, ("attention", 1, 512, 512, None): 8}),
        "ministral-3-8b": (8.5, ["attention"], {("attention", 8, 128, 128, None): 34}),
    }[model]
    assert abs(sum(weight.numel() for weight in made.parameters()) / 1e9 - expected[0]) < 0.1
    assert [layer[0] for layer in found] == expected[1] * (len(found) // len(expected[1]))
    assert {layer: found.count(layer) for layer in found} == expected[2]
    text = made.config
    heads = {"qwen3-5-9b": 16, "gemma-4-12b": 16, "ministral-3-8b": 32}[model]
    assert text.num_attention_heads == heads
    if model == "qwen3-5-9b":
        assert (text.linear_num_key_heads, text.linear_num_value_heads, text.linear_conv_kernel_dim) == (16, 32, 4)
    if model == "gemma-4-12b":
        assert text.attention_k_eq_v and text.final_logit_softcapping == 30
        assert kind == "state-memory" or draft.capture.suppressed == (258882, 258883)
    if model == "ministral-3-8b":
        assert text.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("name", SERVED)
def test_a_seeded_model_that_is_served_has_the_full_size_geometry_and_is_admitted(name, monkeypatch):
    table, draft = study(name), freezing.draft_of(study(name))
    assert (draft.study, draft.scope, draft.device) == (name, "production", "cuda")
    assert "seeded weights, no quality claim" in draft.title and "nothing of its quality" in table["expects"]["validates"]
    fused = [arm for arm in draft.arms if arm.implementation == "fused"]
    assert {(arm.keys, arm.values) for arm in fused} == {("bf16", "bf16"), ("bf16", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3")}
    made, _ = checkpoints.load(seeded_checkpoint(table["checkpoint"]), "bf16", device="meta")
    expected = {
        "gemma-4-12b-seeded-production": ["16/8 d256 window 1024", "16/1 d512"],
        "qwen3-5-9b-seeded-production": ["16/4 d256"],
        "qwen3-8b-seeded-production": ["32/8 d128"],
    }[name]
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    for arm in fused:
        geometry.guard(made.config, arm)
    assert [str(shape) for shape in production.shapes(made.config)] == expected
    assert draft.production.prompt_tokens > max(layer.window or 0 for layer in geometry.declared(made.config))
    same = study("performance-" + name.removesuffix("-seeded-production"))["checkpoint"]
    altered = {"alteration": {"kind": "scaled_queries", "exponent": -4}} if name.startswith("gemma") else {}
    assert table["checkpoint"] == same | altered  # what is served is what is timed


@pytest.mark.parametrize("name", SERVED)
def test_a_seeded_model_is_served_in_miniature(name, monkeypatch):
    table = study(name)
    tiny_size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, **SERVED[name]}
    checkpoint = {**table["checkpoint"], "config": {**table["checkpoint"]["config"], **tiny_size}}
    fed = {"prompt_tokens": 12, "new_tokens": 2, "batch": 2, "seed": 5}
    draft = freezing.draft_of(table | {"device": "cpu", "checkpoint": checkpoint, "production": fed})
    monkeypatch.setattr(geometry, "kernels", lambda: tiny.ORACLE)
    monkeypatch.setattr(kernelchecks, "CHECKS", ())  # those of the model remain
    kept = tiny.Kept()
    production.run(msgspec.structs.replace(draft, checkpoint=seeded_checkpoint(checkpoint)), FOLDER, kept, kept)
    lines = [json.loads(line) for line in kept.files["checks.jsonl"].decode().splitlines()]
    made = {line["check"] for line in lines if line["compared"]}
    assert {check.__name__ for check in production.CHECKS} - made == {"graph_replay_equals_eager"}
    assert not [line for line in lines if line["differing"]]
    completed = [arm for arm in kept.fields["arms"] if arm.outcome == "completed"]
    assert len(completed) == len(draft.arms) - 1 and all(arm.geometry.declared == arm.geometry.measured for arm in completed)


def seeded_checkpoint(table: dict[str, Any]) -> records.Checkpoint:
    """As the runner reads it from a frozen spec, where 30.0 has become 30."""
    made = sources.resolve_checkpoint(table, FOLDER)
    return records.decode(records.Checkpoint, records.encode(made), "checkpoint")


@pytest.mark.parametrize("name", SEEDINGS)
def test_a_seeded_study_runs_in_miniature(name, tmp_path):
    table = study(name)
    tiny_size = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, **SEEDED[name.partition("-seeded-")[0]]}
    small = {"device": "cpu", "checkpoint": {**table["checkpoint"], "config": {**table["checkpoint"]["config"], **tiny_size}}}
    if "capture" in table and name.endswith("capability"):
        small["workload"] = {**table["workload"], "tokens": [24, 60], "chunk": 16}
        small["capture"] = {**table["capture"], "new_tokens": 4, "suppressed": [200, 201] if "suppressed" in table["capture"] else []}
    else:
        small["memory"] = {**table["memory"], "contexts": [16, 48], "chunk": 16}
    draft = freezing.draft_of(table | small)
    frozen = msgspec.structs.replace(draft, checkpoint=seeded_checkpoint(small["checkpoint"]))
    if frozen.workload is not None:
        data = tiny.TEXT.encode()
        dataset = records.Dataset(name="text", file="text.txt", sha256=hashlib.sha256(data).hexdigest(), size=len(data), license="CC0-1.0")
        frozen = msgspec.structs.replace(frozen, workload=msgspec.structs.replace(frozen.workload, dataset=dataset))
        (tmp_path / "text.txt").write_bytes(data)
    kept = tiny.Kept()
    (captures if frozen.workload is not None else memory).run(frozen, tmp_path, kept, kept)
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}
    for arm in kept.fields["arms"]:
        assert arm.geometry.declared == arm.geometry.measured, arm.name


def written_out(case: dict[str, Any], dims: dict[str, int]) -> list[dict[str, Any]]:
    """A case for every pair of its batches and contexts, with the head dimension of its layers."""
    lists = [value if isinstance(value, list) else [value] for value in (case["batch"], case["context"])]
    more = {} if case["kind"] in ("step", "capacity") else dims
    return [{**more, **case, "batch": batch, "context": context} for batch in lists[0] for context in lists[1]]


@pytest.mark.parametrize("name", PERFORMANCES)
def test_the_configuration_of_a_seeded_model_is_that_of_its_architecture(name):
    table = study(name)["checkpoint"]
    config = transformers.AutoConfig.for_model(table["source"].removeprefix("random:").partition("#")[0], **table["config"])
    by_layer = ("head_dim", "num_key_value_heads", "global_head_dim", "num_global_key_value_heads") if "gemma-4" in name else ()
    for key, value in table["config"].items():
        if key != "rope_parameters" and key not in by_layer:
            assert getattr(config, key) == value
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert (len(kinds), kinds.count("full_attention")) == {
        "performance-gemma-3": (48, 8),
        "performance-gemma-3-27b": (62, 10),
        "performance-gemma-4-12b": (48, 8),
        "performance-ministral-3-8b": (34, 34),
        "performance-qwen2-5-7b": (28, 28),
        "performance-qwen3-5-9b": (32, 8),
        "performance-qwen3-8b": (36, 36),
    }[name]


@pytest.mark.parametrize("model", ["gemma3-270m", "smollm2-135m"])
def test_the_bounds_of_the_fused_kernels_are_those_of_the_study_on_a_cpu(model):
    fused, plain = study(f"{model}-fused-loss"), study(f"{model}-loss")
    assert fused["families"] == {name: family for name, family in plain["families"].items() if name != "identity"}
    assert fed(fused) == fed(plain) and fused["checkpoint"] == plain["checkpoint"]


def test_the_bounds_of_the_positive_control_are_those_of_the_unaltered_model():
    assert study("smollm2-135m-rescaled-loss")["families"] == study("smollm2-135m-loss")["families"]


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_is_matched_with_the_study_that_it_widens(name):
    draft, table = freezing.draft_of(study(name)), study(name)
    assert (draft.study, draft.device) == (name, "cuda")
    assert {arm.compute for arm in draft.arms} == {"fp32"} and {arm.scales for arm in draft.arms} == {"none", "unit", "fixed", "dynamic"}
    cells = [arm for arm in draft.arms if arm.role == "candidate" and arm.scales != "none"]
    assert len(cells) == 21 and {(arm.keys, arm.values) for arm in cells} == {("bf16", "fp8_e4m3"), ("fp8_e4m3", "bf16"), ("fp8_e4m3",) * 2}
    assert {arm.granularity for arm in cells if arm.scales == "dynamic"} == {"tensor", "head", "page_head", "token_head"}
    judged = {contrast.candidate for contrast in draft.contrasts if contrast.baseline == "k16v16"}
    assert judged == {arm.name for arm in cells}
    narrow = study(name.replace("-grid-loss", "-loss").replace("-rescaled-grid-task", "-gsm8k").replace("-grid-task", "-gsm8k"))
    parts = ("families", "tolerances", "checkpoint") if draft.task is None else ("task",)
    for part in parts:
        if part == "checkpoint" and "rescaled" in name:  # rescaled further: below
            continue
        assert table[part] == narrow[part]
    if draft.task is None:
        assert fed(table) == fed(narrow)
        over = [contrast for contrast in draft.contrasts if contrast.family == "advantage"]
        assert len(over) == 7 and {draft.common_control(contrast) for contrast in over} == {"k16v16"}


def test_the_suite_of_precision_and_scaling_calibrates_what_it_then_scales():
    ran = []
    suite = dryrun.suite_of("precision-and-scaling")
    for name in suite.studies:
        sources = {arm["scale_source"] for arm in study(name)["arms"] if "scale_source" in arm}
        assert sources <= {f"study:{each}" for each in ran}
        ran.append(name)
    assert set(GRIDS) <= set(ran)
    for kind in ("", "rescaled-"):
        calibrated, graded = study(f"smollm2-135m-{kind}calibration"), study(f"smollm2-135m-{kind}grid-loss")
        assert calibrated["checkpoint"] == graded["checkpoint"] == study(f"smollm2-135m-{kind}grid-task")["checkpoint"]
    altered, narrow = (study(name)["checkpoint"] for name in ("smollm2-135m-rescaled-grid-task", "smollm2-135m-rescaled-loss"))
    assert altered["alteration"] == narrow["alteration"] | {"exponent": 18} and altered["sha256"] == narrow["sha256"]


def test_the_demo_pins_the_prose_that_ships():
    data = (FOLDER / "prose.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() == study("demo")["workload"]["sha256"]
    assert len(data) > 13_000 and data.isascii()


@pytest.mark.slow
def test_keys_in_8_bit_spread_the_losses_of_a_trained_model_more_than_values_do(tmp_path):
    table = study("demo")
    given = table["checkpoint"]
    file = records.CheckpointFile(path=given["source"].rpartition("/")[2], sha256=given["sha256"], size=given["size"])
    checkpoint = records.Checkpoint(name=given["name"], source=given["source"], license=given["license"], files=(file,))
    text = (FOLDER / "prose.txt").read_bytes()
    frozen = tiny.spec(
        checkpoint=checkpoint,
        arms=tuple(records.convert(records.Arm, arm, "demo") for arm in table["arms"]),
        dataset=records.Dataset(name="prose", file="prose.txt", sha256=hashlib.sha256(text).hexdigest(), size=len(text), license="CC0-1.0"),
        spans=tuple(records.Span(start=n * 127, tokens=127) for n in range(2)),
        chunk=64,
        greedy=None,
    )
    inputs = tiny.freeze(tmp_path / "frozen", frozen) / "inputs"
    (inputs / "prose.txt").write_bytes(text)
    kept = tiny.Kept()
    losses.run(frozen, inputs, kept, kept)
    documents = [load(data) for name, data in kept.files.items() if name.startswith("samples/")]
    assert {arm.outcome for arm in kept.fields["arms"]} == {"completed"}

    def series(name: str) -> np.ndarray:
        return np.concatenate([document[name] for document in documents]).astype(np.float64)

    spread = {name: np.std(series(f"{name}.loss") - series("k16v16.loss")) for name in ("k16v16-repeat", "k16v8", "k8v16", "k8v8")}
    assert not series("own-fp32.gap.native").any()
    assert (
        spread["k16v16-repeat"] < spread["k16v8"] / 3 and spread["k16v8"] < spread["k8v16"] / 1.5 and spread["k16v8"] < spread["k8v8"] / 1.5
    )
    assert 2 < series("native.loss").mean() < 5


@pytest.mark.parametrize("name", TASKS)
def test_a_study_of_a_task_is_named_like_its_file_and_says_how_many_items_it_needs(name):
    draft = freezing.draft_of(study(name))
    assert (draft.study, draft.scope, draft.format) == (name, "quality.task", "kv-ledger/spec/3")
    assert {contrast.family for contrast in draft.contrasts} == set(records.ANSWERS)
    assert {arm.role for arm in draft.arms} >= {"control", "candidate"}
    assert f"this study has {len(draft.task.items)} items" in draft.task.power


@pytest.mark.parametrize("model", sorted({name.partition("-seeded-")[0] for name in SEEDINGS} & {name[12:] for name in PERFORMANCES}))
def test_a_seeded_model_that_is_timed_is_the_one_that_is_captured_and_measured(model):
    timed = study(f"performance-{model}")["checkpoint"]
    assert all(study(name)["checkpoint"] == timed for name in SEEDINGS if name.startswith(model))

"""Small, valid records and raw samples for tests. Made by rule from a seed; nothing here is a measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from ledger import digest, production, recipes, records
from ledger.claims import checkpoint_id

HEX = "0123456789abcdef"
NOW = "2026-01-02T03:04:05Z"

ARMS = (
    records.Arm(name="native", role="control", implementation="native", compute="fp32", keys="fp32", values="fp32"),
    records.Arm(name="own-fp32", role="candidate", implementation="reference", compute="fp32", keys="fp32", values="fp32"),
    records.Arm(name="k16v16", role="control", implementation="reference", compute="fp32", keys="bf16", values="bf16"),
    records.Arm(
        name="k16v16-repeat",
        role="repeat",
        implementation="reference",
        compute="fp32",
        keys="bf16",
        values="bf16",
        chunk=16,
        repeats="k16v16",
    ),
    records.Arm(name="k16v8", role="candidate", implementation="reference", compute="fp32", keys="bf16", values="fp8_e4m3", scales="unit"),
    records.Arm(
        name="k8v8", role="candidate", implementation="reference", compute="fp32", keys="fp8_e4m3", values="fp8_e4m3", scales="unit"
    ),
)

FAMILIES = (
    records.Family(name="identity", gates=(records.Gate(statistic="bit_equal", bound=0.0, harm=0.0),)),
    records.Family(
        name="loss",
        resamples=199,
        gates=(
            records.Gate(statistic="loss_difference_mean", bound=0.02, harm=0.02),
            records.Gate(statistic="kl_p999", bound=0.05, harm=0.2),
            records.Gate(statistic="top1_disagreement", bound=0.03, harm=0.1),
        ),
    ),
    records.Family(name="advantage", resamples=199, gates=(records.Gate(statistic="kl_difference_mean", bound=-0.001, harm=0.0),)),
)

CONTRASTS = tuple(
    records.Contrast(candidate=candidate, baseline=baseline, family=family)
    for candidate, baseline, family in (
        ("own-fp32", "native", "identity"),
        ("k16v16", "native", "loss"),
        ("k16v8", "k16v16", "loss"),
        ("k8v8", "k16v16", "loss"),
        ("k16v8", "k8v8", "advantage"),
    )
)

# standard deviation of a token's loss difference to native, and mean KL to the control, by arm
NOISE = {
    "native": (0.0, 0.0),
    "own-fp32": (0.0, 0.0),
    "k16v16": (0.009, 2.5e-5),
    "k16v16-repeat": (0.009, 2.5e-5),
    "k16v8": (0.03, 5e-4),
    "k8v8": (0.14, 6e-3),
}


def checkpoint(**changes: Any) -> records.Checkpoint:
    """A checkpoint of one file, with a digest that names no real file."""
    fields: dict[str, Any] = {
        "name": "Toy-1M",
        "source": "file:toy.safetensors",
        "license": "CC0-1.0",
        "files": (records.CheckpointFile(path="toy.safetensors", sha256=digest.sha256(b"toy weights"), size=11),),
    }
    return records.Checkpoint(**{**fields, **changes})


def workload(documents: int = 4, tokens: int = 32, **changes: Any) -> records.Workload:
    """``documents`` consecutive spans of ``tokens`` tokens."""
    fields: dict[str, Any] = {
        "dataset": records.Dataset(name="toy text", file="toy.txt", sha256=digest.sha256(b"toy text"), size=8, license="CC0-1.0"),
        "inputs": "digest",
        "spans": tuple(records.Span(start=index * tokens, tokens=tokens) for index in range(documents)),
        "bos": False,
        "split_special_tokens": True,
        "chunk": 8,
    }
    return records.Workload(**{**fields, **changes})


def spec(**changes: Any) -> records.Spec:
    """A quality.loss spec with the standard arms, contrasts and families."""
    fields: dict[str, Any] = {
        "format": "kv-ledger/spec/1",
        "study": "toy",
        "title": "A toy study",
        "scope": "quality.loss",
        "checkpoint": checkpoint(),
        "workload": workload(),
        "arms": ARMS,
        "contrasts": CONTRASTS,
        "families": FAMILIES,
        "tolerances": {},
    }
    return records.Spec(**{**fields, **changes})


def samples(frozen: records.Spec, seed: int = 0, noise: dict[str, tuple[float, float]] | None = None) -> dict[str, bytes]:
    """Evidence bytes ``samples/NNNN.safetensors`` as a runner would write them, one per document of ``frozen``."""
    noise = {**NOISE, **(noise or {})}
    files: dict[str, bytes] = {}
    references, gaps = frozen.references(), frozen.gaps()
    for index, span in enumerate(frozen.workload.spans):
        rng = np.random.default_rng([seed, index])
        positions = span.tokens + int(frozen.workload.bos) - 1
        native = rng.gamma(2.0, 1.6, positions)
        top = rng.integers(0, 1000, positions)
        tensors: dict[str, np.ndarray] = {}
        for arm in frozen.arms:
            deviation, divergence = noise.get(arm.name, (0.0, 0.0))
            own = np.random.default_rng([seed, index, *(arm.repeats or arm.name).encode()])
            tensors[f"{arm.name}.loss"] = np.abs(native + deviation * own.standard_normal(positions)).astype(np.float32)
            flips = own.random(positions) < divergence * 8
            tensors[f"{arm.name}.top1"] = np.where(flips, top + 1, top).astype(np.int32)
            for control in sorted(references[arm.name]):
                same = arm.repeats == control
                spread = own.gamma(0.5, 2.0, positions) * divergence
                tensors[f"{arm.name}.kl.{control}"] = (0 * spread if same else spread).astype(np.float32)
            for baseline in gaps[arm.name]:
                tensors[f"{arm.name}.gap.{baseline}"] = np.zeros(positions, np.float32)
        files[f"samples/{index:04}.safetensors"] = save(tensors)
    return files


def _backings(arm: records.Arm, tokens: int) -> tuple[records.Backing, ...]:
    width = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1}
    return tuple(
        records.Backing(
            bytes=tokens * 2 * 16 * width[form],
            dtype=form,
            kind="attention",
            layers=(layer,),
            holds=side,
            address=4096 * (2 * layer + at),
            tokens=tokens,
        )
        for layer in range(2)
        for at, (side, form) in enumerate((("keys", arm.keys), ("values", arm.values)))
    )


def arm_result(arm: records.Arm, tokens: int = 32, **changes: Any) -> records.ArmResult:
    """A completed arm of two layers with two KV heads of dimension 16, whose runtime did what was asked."""
    policy = {
        "implementation": arm.implementation,
        "compute": arm.compute,
        "keys": arm.keys,
        "values": arm.values,
        "scales": arm.scales,
        "granularity": arm.granularity,
    }
    layers = tuple(records.LayerGeometry(layer=layer, kind="attention", kv_heads=2, key_dim=16, value_dim=16) for layer in range(2))
    fields: dict[str, Any] = {
        "name": arm.name,
        "outcome": "completed",
        "effective": policy,
        "measured": policy,
        "backends": (records.Backend(name=arm.backend, accepted=True),),
        "geometry": records.Geometry(declared=layers, measured=layers),
        "census": {"fp32": 1_000_000},
        "backings": _backings(arm, tokens),
        "seconds": 1.5,
    }
    return records.ArmResult(**{**fields, **changes})


def host(**changes: Any) -> records.Host:
    """A plain two-core machine."""
    fields: dict[str, Any] = {
        "system": "Linux",
        "machine": "x86_64",
        "processor": "Toy CPU",
        "cores": 2,
        "memory_bytes": 1 << 34,
        "accelerator": None,
        "threads": 2,
        "python": "3.11.7",
        "packages": {"torch": "2.13.0"},
    }
    return records.Host(**{**fields, **changes})


def _media_type(name: str) -> str:
    return "application/x-ndjson" if name.endswith(".jsonl") else "application/vnd.safetensors"


def result(frozen: records.Spec, files: dict[str, bytes], **changes: Any) -> records.Result:
    """The ``result.json`` that goes with ``files``."""
    fields: dict[str, Any] = {
        "format": "kv-ledger/result/1",
        "spec": records.identify(frozen),
        "outcome": "completed",
        "started": NOW,
        "stopped": NOW,
        "host": host(),
        "sources": {"ledger/digest.py": digest.sha256_file(Path(digest.__file__))[0]},
        "documents": tuple(
            records.Document(tokens=span.tokens + int(frozen.text.bos), sha256=digest.sha256(b"%d" % span.start))
            for span in frozen.documents
        ),
        "arms": tuple(arm_result(arm) for arm in frozen.arms),
        "evidence": tuple(
            records.Evidence(name=name, sha256=digest.sha256(data), size=len(data), media_type=_media_type(name))
            for name, data in sorted(files.items())
        ),
        "peak_memory_bytes": 1 << 30,
    }
    return records.Result(**{**fields, **changes})


def harness(**changes: Any) -> records.Harness:
    """A clean harness, matched to a commit."""
    fields: dict[str, Any] = {"matched": "commit", "commit": "a" * 40, "state": "clean"}
    return records.Harness(**{**fields, **changes})


def run(frozen: records.Spec, found: records.Result, **changes: Any) -> records.Run:
    """A run over ``found`` without derived figures; pass ``measurements`` and ``decisions`` to add them."""
    data = records.encode(found)
    own = records.Evidence(name="result.json", sha256=digest.sha256(data), size=len(data), media_type="application/json")
    fields: dict[str, Any] = {
        "format": "kv-ledger/run/1",
        "rules": "1",
        "spec": records.identify(frozen),
        "result": own.sha256,
        "outcome": "completed",
        "reason": "",
        "harness": harness(),
        "evidence": (own, *found.evidence),
    }
    return records.Run(**{**fields, **changes})


def write_result_folder(folder: Path, found: records.Result, files: dict[str, bytes]) -> Path:
    """Lay ``found`` and ``files`` out as a runner does."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "result.json").write_bytes(records.encode(found))
    return folder


# ---------------------------------------------------------------- scopes without a dataset


def _native(name: str, backend: str, **changes: Any) -> records.Arm:
    fields: dict[str, Any] = {"role": "control", "implementation": "native", "compute": "bf16", "keys": "bf16", "values": "bf16"}
    return records.Arm(name=name, backend=backend, **{**fields, **changes})


def fused(name: str, keys: str, values: str, **changes: Any) -> records.Arm:
    """A fused arm in bf16, with unit scales where it stores 8 bit."""
    fields: dict[str, Any] = {"role": "candidate", "scales": "unit" if "fp8_e4m3" in (keys, values) else "none", "backend": "kv_fused"}
    return records.Arm(name=name, implementation="fused", compute="bf16", keys=keys, values=values, **{**fields, **changes})  # type: ignore[arg-type]


FUSED = (fused("k16v16", "bf16", "bf16"), fused("k16v8", "bf16", "fp8_e4m3"), fused("k8v8", "fp8_e4m3", "fp8_e4m3"))
CONTENDERS = (
    _native("sdpa-flash", "sdpa:flash"),
    _native("flashinfer", "flashinfer"),
    _native("transformers", "transformers"),
    _native("flashinfer-e4m3", "flashinfer", role="candidate", keys="fp8_e4m3", values="fp8_e4m3", scales="unit"),
)
CASES = (
    records.Case(kind="decode", batch=32, context=8192, head_dim=128),
    records.Case(kind="decode", batch=64, context=32768, shortest=128, head_dim=128),
    records.Case(kind="append", batch=32, context=8192, head_dim=128),
    records.Case(kind="prefill", batch=1, context=8192, head_dim=128, chunk=2048),
    records.Case(kind="step", batch=32, context=8192),
    records.Case(kind="capacity", batch=1, context=8192),
)


def _without_dataset(**changes: Any) -> records.Spec:
    fields: dict[str, Any] = {
        "format": "kv-ledger/spec/2",
        "study": "toy",
        "title": "A toy study",
        "checkpoint": checkpoint(name="Toy 1M"),
        "workload": None,
        "contrasts": (),
        "families": (),
        "device": "cuda",
    }
    return records.Spec(**{**fields, **changes})


def performance_spec(**changes: Any) -> records.Spec:
    """A performance spec: two native contenders, a step's, a peer in 8 bit, and three fused arms, over one case of most kinds."""
    timed = records.Performance(cases=CASES, repeats=7, launches=5, rotate_bytes=1 << 28, budget_bytes=1 << 30)
    fields = {"study": "toy-speed", "scope": "performance", "arms": (*CONTENDERS, *FUSED), "performance": timed}
    return _without_dataset(**{**fields, **changes})


def production_spec(**changes: Any) -> records.Spec:
    """A production spec: a native control and three fused arms."""
    fed = records.Production(prompt_tokens=100, new_tokens=8, batch=2)
    fields = {"study": "toy-serving", "scope": "production", "arms": (_native("native", "sdpa"), *FUSED), "production": fed}
    return _without_dataset(**{**fields, **changes})


def memory_spec(**changes: Any) -> records.Spec:
    """A spec of state memory: a native control and a reference candidate at two contexts."""
    asked = records.Memory(contexts=(16, 64), chunk=16, budget_bytes=1 << 20)
    arms = (_native("native", "sdpa"), ARMS[4])
    fields = {"format": "kv-ledger/spec/3", "study": "toy-memory", "scope": "state memory", "arms": arms, "memory": asked}
    return _without_dataset(**{**fields, **changes})


MICROSECONDS = {
    "sdpa-flash": 250.0,
    "flashinfer": 255.0,
    "transformers": 9000.0,
    "flashinfer-e4m3": 240.0,
    "k16v16": 248.0,
    "k16v8": 190.0,
    "k8v8": 133.0,
}
COPY_US = 2000.0
MOVED = {"bf16": 2, "fp8_e4m3": 1}


def timings(
    frozen: records.Spec, changes: dict[tuple[str, str], dict[str, Any]] | None = None, copy_us: float = COPY_US
) -> dict[str, bytes]:
    """Evidence of a performance run, as a runner writes it.

    ``changes`` go to the line of a case and arm; its ``times`` replace the samples, and ``None`` in their place leaves them out.
    A launch moves 4.2 GB/s times its microseconds at 16 bit, so that a decode in 250 µs is at the bandwidth of the copy.
    """
    assert frozen.performance is not None
    lines: list[dict[str, Any]] = [_line("copy", "", "torch.neg int32", int(4.2e6 * COPY_US / 1e3))]
    files: dict[str, bytes] = {}
    for number, case in enumerate(frozen.performance.cases):
        series = {"copy|": np.full(3, copy_us)}
        for arm in frozen.arms:
            if not records.takes_part(arm, case):
                continue
            moved = (MOVED[arm.keys] + MOVED[arm.values]) / 4
            line = _line(case.name, arm.name, f"{arm.backend} {arm.keys}/{arm.values}", int(4.2e3 * 250 * moved))
            if case.kind not in ("step", "capacity"):
                eight = arm.implementation == "native" and arm.keys == "fp8_e4m3"
                line |= {"relative_error": None if eight else 0.002, "relative_error_unquantised": 0.02}
            times: Any = MICROSECONDS[arm.name] * (1 + 0.01 * np.arange(frozen.performance.repeats))
            if case.kind == "capacity":
                line |= {"tokens": int(6000 / moved), "bytes": 1 << 30}
                times = None
            change = dict((changes or {}).get((case.name, arm.name), {}))
            times = change.pop("times", times)
            line |= change
            lines.append(line)
            if times is not None and not line["refused"]:
                series[f"{case.name}|{arm.name}"] = np.asarray(times, np.float64)
        files[f"timings/{number:04}.safetensors"] = save(series)
    files["cases.jsonl"] = b"".join(digest.canonical(line) + b"\n" for line in lines)
    return files


def _line(case: str, arm: str, kernel: str, moved: int) -> dict[str, Any]:
    return {
        "case": case,
        "arm": arm,
        "kernel": kernel,
        "bytes": moved,
        "launches": 5,
        "refused": "",
        "relative_error": None,
        "relative_error_unquantised": None,
    }


def checks(frozen: records.Spec, changes: dict[tuple[str, str], dict[str, Any] | None] | None = None) -> dict[str, bytes]:
    """Evidence of a production run in which every check passes; ``changes`` go to the line of a check and arm, None leaves it out."""
    lines = []
    for question in frozen.questions():
        for name in production.CHECKS:
            line: dict[str, Any] = {"check": name, "arm": question.candidate, "compared": 1000, "differing": 0, "largest": 0.0}
            line |= {"tolerance": production.bar(name, frozen.arm(question.candidate)), "detail": "prompts of 1 and 64 tokens"}
            change = (changes or {}).get((name, question.candidate), {})
            if change is not None:
                lines.append(line | change)
    return {"checks.jsonl": b"".join(digest.canonical(line) + b"\n" for line in lines)}


# ---------------------------------------------------------------- what others say, and what to install

DOCUMENT = b"Model A keeps its answers. Model B was not tried."
LOCK = b"msgspec==0.23.0 --hash=sha256:" + b"ab" * 32 + b"\n"


def fact(**changes: Any) -> records.Fact:
    """One thing that a document says."""
    fields: dict[str, Any] = {
        "model": "Model A",
        "policy": "K16/V8",
        "scope": "quality.task",
        "outcome": "passes",
        "says": "Answers are kept.",
    }
    return records.Fact(**{**fields, **changes})


def report(**changes: Any) -> records.Report:
    """A report on :data:`DOCUMENT`, which it keeps."""
    name = digest.sha256(DOCUMENT)
    fields: dict[str, Any] = {
        "format": "kv-ledger/report/1",
        "title": "What model A and model B do",
        "place": "a page elsewhere",
        "sha256": name,
        "size": len(DOCUMENT),
        "license": "CC0-1.0",
        "bytes": "kept",
        "facts": (fact(), fact(model="Model B", outcome="not measured", says="Nobody tried it.")),
        "evidence": (records.Evidence(name="document", sha256=name, size=len(DOCUMENT), media_type="application/octet-stream"),),
    }
    return records.Report(**{**fields, **changes})


def policy(arm: str = "k16v8") -> records.Policy:
    """The policy of one of the standard arms."""
    return recipes.policy_of(next(item for item in ARMS if item.name == arm))


def recipe(claims: tuple[str, ...], **changes: Any) -> records.Recipe:
    """A recipe for the toy checkpoint and K16/V8, pinned by :data:`LOCK`."""
    fields: dict[str, Any] = {
        "format": "kv-ledger/recipe/1",
        "name": "toy-k16v8",
        "title": "The toy model with cheap values",
        "checkpoint": checkpoint_id(checkpoint()),
        "policy": policy(),
        "steps": ("pip install --require-hashes -r toy.lock",),
        "claims": claims,
        "evidence": (records.Evidence(name="toy.lock", sha256=digest.sha256(LOCK), size=len(LOCK), media_type="text/plain"),),
    }
    return records.Recipe(**{**fields, **changes})

"""production: whether the fused path may serve. Named checks, each with what it compared and how far that lay apart.

Kernels are checked over seeded random states, once for each distinct attention geometry of the model
(:mod:`runners.kernelchecks`); the model is checked in its own decode steps, over seeded random prompts, here. All checks of an arm
are made, whatever the first of them finds.

A row of a matrix product depends on the shape of the product, since libraries choose their kernels by it. So the model is
compared among batches of one shape, where a sequence's companions change in content and in length; that a sequence's
attention is the same alone and among others is checked on the kernels.

Evidence is ``checks.jsonl``, one canonical line a check and arm (:mod:`runners.findings`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ledger import records
from ledger.errors import InputError, RefusedError
from runners import caches, checkpoints, geometry, kernelchecks, losses, scales, serving
from runners.findings import TOLERANCES, Finding
from runners.kernelchecks import Attention, Rig
from runners.words import formats

FILE = "checks.jsonl"
LAUNCHED = ("write", "prefill", "decode")
"""The kernels of a forward pass."""
NOT_ASKED = "not_asked: production checks are of fused candidates, and this arm is none."


def shapes(config: Any) -> list[Attention]:
    """The distinct attention geometries of a model, in the order of their first layers."""
    text = config.get_text_config(decoder=True)
    cap = getattr(text, "attn_logit_softcapping", None) or 0.0
    found = [
        Attention(text.num_attention_heads, layer.kv_heads, layer.key_dim, layer.window or 0, cap)
        for layer in geometry.declared(config)
        if layer.kind != "recurrent"
    ]
    return list(dict.fromkeys(found))


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class Prompts:
    """Token ids [B, prompt + new]; of each prompt the last ``real`` tokens count, the rest is padding on the left."""

    ids: torch.Tensor
    real: torch.Tensor


class Served:
    """The model of an arm, and seeded prompts that it continues through fused caches."""

    def __init__(
        self, model: Any, arm: records.Arm, plan: records.Production, device: str, fixed: scales.FixedScales | None = None
    ) -> None:
        self.model, self.arm, self.plan, self.device, self.fixed = model, arm, plan, device, fixed
        random = torch.Generator().manual_seed(plan.seed)
        words = model.config.get_text_config(decoder=True).vocab_size
        size = (plan.batch, plan.prompt_tokens + plan.new_tokens)
        ids, others = (torch.randint(words, size, generator=random) for _ in range(2))
        others[0] = ids[0]
        rows = torch.arange(plan.batch)
        shorter, shortest = (plan.prompt_tokens - rows * plan.prompt_tokens // (parts * plan.batch) for parts in (3, 2))
        self.prompts = Prompts(ids.to(device), shorter.to(device))
        self.companions = Prompts(others.to(device), shortest.to(device))
        """Other prompts of other lengths; the first is the same."""
        self.whole = Prompts(ids.to(device), torch.full_like(shorter, plan.prompt_tokens).to(device))
        """Prompts of one length."""
        self._known: dict[int, torch.Tensor] = {}

    def cache(self, seed: int | None = None) -> serving.FusedCache:
        """An empty cache; ``seed`` shuffles its pages."""
        size = {"batch": self.plan.batch, "max_tokens": self.plan.prompt_tokens + self.plan.new_tokens}
        return serving.FusedCache(self.model.config, self.arm, **size, device=self.device, seed=seed, fixed=self.fixed)

    def prefill(self, cache: serving.FusedCache, prompts: Prompts, chunk: int = 0) -> torch.Tensor:
        """Logits [B, vocabulary] after the prompts, which are written ``chunk`` tokens at a time (0: all at once)."""
        width = self.plan.prompt_tokens
        mask = (torch.arange(width, device=self.device)[None] >= width - prompts.real[:, None]).long()
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        for first, last in losses.blocks(width, chunk or width):
            logits = self._forward(cache, prompts.ids[:, first:last], mask[:, :last], positions[:, first:last])
        return logits

    def steps(
        self, cache: serving.FusedCache, prompts: Prompts, step: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Logits [new tokens, B, vocabulary] of the tokens that continue the prompts, by ``step`` (None: eagerly)."""
        width, kept = self.plan.prompt_tokens, []
        mask = (torch.arange(prompts.ids.shape[1], device=self.device)[None] >= width - prompts.real[:, None]).long()
        for at in range(width, prompts.ids.shape[1]):
            ids = prompts.ids[:, at]
            if step is None:
                logits = self._forward(cache, ids[:, None], mask[:, : at + 1], (prompts.real + at - width)[:, None])
            else:
                logits = step(ids)
            kept.append(logits.clone())
        return torch.stack(kept)

    def logits(self, cache: serving.FusedCache, prompts: Prompts) -> torch.Tensor:
        """Logits [1 + new tokens, B, vocabulary] after the prompts and after each token that continues them."""
        return torch.cat([self.prefill(cache, prompts)[None], self.steps(cache, prompts)])

    def known(self, prompts: Prompts, cache: serving.FusedCache | None = None) -> torch.Tensor:
        """:meth:`logits` in a fresh cache (``cache``, where one is at hand), computed once for all checks."""
        if id(prompts) not in self._known:
            self._known[id(prompts)] = self.logits(self.cache() if cache is None else cache, prompts)
        return self._known[id(prompts)]

    def _forward(self, cache: serving.FusedCache, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        options = {caches.cache_argument(self.model): cache, "attention_mask": mask, "position_ids": positions}
        logits: torch.Tensor = self.model(ids, **options, use_cache=True, logits_to_keep=1).logits[:, -1]
        return logits


class Recorder:
    """The kernels, and which of them were launched on what: ``decode bf16/e4m3 d128``."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.ran: list[str] = []

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.kernels, name)
        if name not in LAUNCHED:
            return kernel

        def launch(*arguments: Any, **options: Any) -> Any:
            pages = arguments[0 if name == "write" else 1]
            stored = formats(geometry.word(pages.keys.dtype), geometry.word(pages.values.dtype))
            self.ran.append(f"{name} {stored} d{pages.keys.shape[-1]}")
            return kernel(*arguments, **options)

        return launch


# ---------------------------------------------------------------- checks of the model


def graph_replay_equals_eager(served: Served, finding: Finding) -> None:
    """A captured step, replayed, against the model called step by step: for one batch, and after a reset for another."""
    if torch.device(served.device).type != "cuda":
        finding.notes.append(f"not run: there are no graphs on {served.device}")
        return
    cache, graph = served.cache(), None
    for prompts in (served.prompts, served.companions):
        expected = served.known(prompts)[1:]
        cache.reset()
        served.prefill(cache, prompts)
        graph = graph or serving.DecodeGraph(served.model, cache)
        finding.same(served.steps(cache, prompts, graph.step), expected, "logits of replayed steps")
    finding.notes.append(f"2 x {served.plan.new_tokens} steps of {served.plan.batch} sequences")


def batch_independence(served: Served, finding: Finding) -> None:
    """The first sequence beside other companions, of other lengths."""
    one, other = (served.known(prompts)[:, 0] for prompts in (served.prompts, served.companions))
    finding.same(other, one, "logits beside other companions")
    finding.notes.append("the model, beside other companions")


def page_independence(served: Served, finding: Finding) -> None:
    """The same prompts in caches whose pages are handed out in other orders."""
    other = served.logits(served.cache(served.plan.seed), served.prompts)
    finding.same(other, served.known(served.prompts), "logits in other pages")
    finding.notes.append("the model, in other pages")


def chunked_equals_one_shot(served: Served, finding: Finding) -> None:
    """Prompts in chunks against one shot."""
    chunk = served.plan.prompt_tokens // 3 + 1
    one, other = (served.prefill(served.cache(), served.whole, size) for size in (0, chunk))
    arm = served.arm
    allowed = max(TOLERANCES[format]["logits"] for format in (arm.compute, arm.keys, arm.values))
    finding.near(other, one, allowed, f"logits after chunks of {chunk}")
    finding.notes.append(f"logits of {served.plan.prompt_tokens} tokens in chunks of {chunk}")


def poisoned_pages(served: Served, finding: Finding) -> None:
    """NaN wherever the pool has nothing stored, before the prompts and again behind them."""
    one, cache = served.known(served.prompts), served.cache()
    cache.pool.poison()
    first = served.prefill(cache, served.prompts)
    cache.pool.poison()
    finding.same(torch.cat([first[None], served.steps(cache, served.prompts)]), one, "logits in poisoned pages")
    finding.notes.append("the model, in poisoned pages")


def returned_pages(served: Served, finding: Finding) -> None:
    """A cache that held other prompts before."""
    one, cache = served.known(served.prompts), served.cache()
    served.prefill(cache, served.companions)
    cache.reset()
    finding.same(served.logits(cache, served.prompts), one, "logits in returned pages")
    finding.notes.append("the model, in returned pages")


def kernel_recorded(served: Served, finding: Finding) -> None:
    """Every attention layer launches the kernels of the arm's formats, in prefill and in a step, and nothing else attends."""
    cache = served.cache()
    cache.kernels = recorder = Recorder(cache.kernels)
    served.prefill(cache, served.whole)
    served._forward(cache, served.whole.ids[:, -1:], torch.ones_like(served.whole.ids[:, : cache.seen + 1]), served.whole.real[:, None])
    layers = [layer for layer in geometry.declared(served.model.config) if layer.kind != "recurrent"]
    stored = formats(served.arm.keys, served.arm.values)
    expected = [f"{name} {stored} d{layer.key_dim}" for kind in ("prefill", "decode") for layer in layers for name in ("write", kind)]
    finding.fact(recorder.ran == expected, f"launched {recorder.ran} instead of {expected}")
    finding.notes.append(f"{len(recorder.ran)} launches in {len(layers)} layers")


def unsupported_refused(served: Served, finding: Finding) -> None:
    """What a served cache cannot take raises, and changes nothing that it holds."""
    cache, ids = served.cache(), served.whole.ids
    width, more = served.plan.prompt_tokens, served.plan.new_tokens
    served.prefill(cache, served.whole)

    def forward(ids: torch.Tensor, mask: torch.Tensor | None = None) -> object:
        tokens = ids.shape[1]
        mask = torch.ones(len(ids), width + tokens, dtype=torch.int64, device=served.device) if mask is None else mask
        positions = torch.arange(width, width + tokens, device=served.device).expand(len(ids), tokens)
        return served._forward(cache, ids, mask, positions)

    right = torch.ones(len(ids), width + 2, dtype=torch.int64, device=served.device)
    right[:, -1] = 0
    requests: list[tuple[str, Callable[[], object]]] = [
        ("more tokens than it has room for", lambda: forward(ids[:, : more + 1])),
        ("padding on the right", lambda: forward(ids[:, :2], right)),
    ]
    if len(cache.fused) == len(cache.layers):  # a recurrent layer comes first, and stops in its own words
        requests.append(("another batch", lambda: forward(ids.repeat(2, 1)[:, :1])))
    kernelchecks.refuse(finding, "the served cache", requests)
    held = {cache.pool.length(sequence) for sequence in cache.sequences}
    finding.fact(held == {width}, f"{sorted(held)} tokens are held after what was refused, instead of {width}")


CHECKS = (
    graph_replay_equals_eager,
    batch_independence,
    page_independence,
    chunked_equals_one_shot,
    poisoned_pages,
    returned_pages,
    kernel_recorded,
    unsupported_refused,
)
"""Each is known by its name; one of the same name in :mod:`runners.kernelchecks` is a part of the same check."""
NAMES = tuple(dict.fromkeys(check.__name__ for check in (*CHECKS, *kernelchecks.CHECKS)))


# ---------------------------------------------------------------- the run


def rigs(arm: records.Arm, model: Any, plan: records.Production, device: str) -> list[Rig]:
    """Where an arm's kernels are checked: one for each geometry of the model."""
    return [Rig(geometry.kernels(), arm, shape, plan, device) for shape in shapes(model.config)]


def check_arm(served: Served, say: Callable[[str], None]) -> Iterator[Finding]:
    """All checks of one arm, as they are made."""
    arm = served.arm
    for name in NAMES:
        finding = Finding(name, arm.name)
        for check in kernelchecks.CHECKS:
            for rig in rigs(arm, served.model, served.plan, served.device) if check.__name__ == name else ():
                finding.attempt(check, rig, finding)
        for each in CHECKS:
            if each.__name__ == name:
                finding.attempt(each, served, finding)
        say(f"{arm.name}: {finding.words()}")
        yield finding


def admit(arm: records.Arm, model: Any, device: str, calibration: bytes = b"", checkpoint: str = "") -> losses.Running:
    """The arm, ready or refused by the guard or its scales."""
    state = losses.Running(arm, 0, model, device=device)

    def check() -> None:
        geometry.guard(model.config, arm, device)
        model.set_attn_implementation(arm.backend)
        if model.config._attn_implementation != arm.backend:
            raise RefusedError("backend", "The model ignored the attention backend.", expected=arm.backend)
        state.fixed = scales.of_arm(arm, geometry.declared(model.config), calibration, checkpoint)
        state.backends.append(records.Backend(name=arm.backend, accepted=True))

    state.attempt(check)
    return state


def measure(state: losses.Running, served: Served) -> None:
    """The facts of an arm, from a cache that has held prompts and their continuation."""
    state.cache = served.cache()
    served.known(served.prompts, state.cache)
    losses.measure_cache(state)
    state.cache = None


def run(spec: records.Spec, inputs: Path, folder: losses.Folder, progress: losses.Progress) -> None:
    """Check every fused arm that the spec asks about; evidence and facts go to ``folder``.

    ``inputs`` is the frozen folder's ``inputs/``. Raises InputError and ProvenanceError where nothing can be run; an arm that
    the guard refuses is recorded so. An arm that is not fused has nothing to be checked: it is recorded as refused, ``not_asked``, which
    touches no fused arm's decision. What was found stays in ``folder`` where the run stops on the way.
    """
    plan = spec.production
    if plan is None:
        raise InputError(
            "The spec does not say what the production checks feed.", expected="[production]", next="choose a study of that scope."
        )
    calibration = scales.read(spec.arms, inputs)
    asked = {question.candidate for question in spec.questions()}
    models: dict[str, Any] = {}
    for arm in spec.arms:
        if arm.name in asked and arm.compute not in models:
            models[arm.compute] = checkpoints.load(spec.checkpoint, arm.compute, progress.say, inputs, spec.device)[0]
    warnings = checkpoints.cautions(spec.checkpoint, spec.device, next(iter(models.values()), None)) + scales.cautions(calibration)
    folder.update(warnings=tuple(warnings))
    states = {arm.name: admit(arm, models[arm.compute], spec.device, calibration, spec.weights) for arm in spec.arms if arm.name in asked}
    if torch.device(spec.device).type == "cuda":
        ready = [state for state in states.values() if not state.outcome]
        progress.say(f"compiling the kernels of {len(ready)} arms")
        kernelchecks.warm([rig for state in ready for rig in rigs(state.arm, state.model, plan, spec.device)])
    folder.append(FILE, b"")
    results: list[records.ArmResult] = []
    try:
        with torch.inference_mode():
            for arm in spec.arms:
                if arm.name in states:
                    _check(states[arm.name], plan, folder, progress.say)
                    results.append(states[arm.name].result())
                else:
                    results.append(records.ArmResult(name=arm.name, outcome="refused", reason=NOT_ASKED))
                folder.update(arms=tuple(results))
    finally:  # a device that failed on the way leaves what was found until then
        folder.update(arms=tuple(results))


def _check(state: losses.Running, plan: records.Production, folder: losses.Folder, say: Callable[[str], None]) -> None:
    """An admitted arm's checks, one line each, durable as they are made."""
    if state.outcome:
        return
    started = time.perf_counter()
    served = Served(state.model, state.arm, plan, state.device, state.fixed)
    if state.attempt(measure, state, served):
        for finding in check_arm(served, say):
            folder.append(FILE, finding.line())
            folder.update()
        state.outcome, state.seconds = "completed", time.perf_counter() - started

"""A leaner step of the same model: its elementwise modules, each one kernel. The mathematics stays.

    norms       every RMSNorm in one kernel: float32 inside, rounded where the module rounds
    rotary      ``apply_rotary_pos_emb`` in one kernel for queries and keys together
    gated MLPs  gate and up in one matrix product, then act(gate)·up in one kernel

A module is replaced by a ``forward`` of its own instance, so that other models of the same classes stay as they are, and only where a
sample of numbers comes out as before: whatever has another form is left alone. Rotary has the bits of the module's; norms and
products differ in the order of sums, activations in the last bit of a float32 exponential, before it is rounded. Weights of a gate
and its up projection come to stand side by side in memory; the parameters are views of them, so :func:`merge` precedes the first
capture of a graph. Every kernel works for each row by itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.nn import functional

from ledger.errors import RefusedError
from runners import fused
from runners.kernels import round_to, tl, triton

BLOCK = tl.constexpr(1024)
"""Numbers a program of the activation kernel."""
HEADS = tl.constexpr(4)
"""Heads a program of the rotary kernel."""
LARGEST = 16384
"""Widest norm that one program holds."""
ACTIVATIONS = ((functional.silu, "silu"), (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh"))


@triton.jit
def _norm_kernel(
    x, weight, out, eps, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GEMMA: tl.constexpr, INTERPRET: tl.constexpr
):  # fmt: skip
    """ROWS rows of ``x`` [rows, WIDTH]. Gemma's multiplies by 1 + weight and rounds once, at the end."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    where = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    value = tl.load(x + where, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)[None, :]
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)[:, None]
    if not GEMMA:
        value = round_to(value, out.dtype.element_ty, INTERPRET).to(tl.float32)
    value = value * (1.0 + factor if GEMMA else factor)
    tl.store(out + where, round_to(value, out.dtype.element_ty, INTERPRET), mask=mask)


@triton.jit
def _turn(x, out, row, token, head, heads, x_strides, out_strides, cos, sin, HALF: tl.constexpr, INTERPRET: tl.constexpr):
    """Some heads of one token; each product is rounded, then the sum."""
    kind: tl.constexpr = out.dtype.element_ty
    dim, mask = tl.arange(0, HALF), (head < heads)[:, None]
    where = x + row * x_strides[0] + head[:, None] * x_strides[1] + token * x_strides[2] + dim[None, :]
    low, high = tl.load(where, mask=mask, other=0.0).to(tl.float32), tl.load(where + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_low, cos_high = tl.load(cos + dim).to(tl.float32)[None, :], tl.load(cos + HALF + dim).to(tl.float32)[None, :]
    sin_low, sin_high = tl.load(sin + dim).to(tl.float32)[None, :], tl.load(sin + HALF + dim).to(tl.float32)[None, :]
    first = round_to(low * cos_low, kind, INTERPRET).to(tl.float32) - round_to(high * sin_low, kind, INTERPRET).to(tl.float32)
    second = round_to(high * cos_high, kind, INTERPRET).to(tl.float32) + round_to(low * sin_high, kind, INTERPRET).to(tl.float32)
    where = out + row * out_strides[0] + head[:, None] * out_strides[1] + token * out_strides[2] + dim[None, :]
    tl.store(where, round_to(first, kind, INTERPRET), mask=mask)
    tl.store(where + HALF, round_to(second, kind, INTERPRET), mask=mask)


@triton.jit
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_heads, k_heads, q_strides, k_strides, q_out_strides, k_out_strides, cos_strides, sin_strides,
    HALF: tl.constexpr, HEADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, queries before keys. Grid: (blocks of heads, tokens, batch)."""
    block, token, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    cos += row * cos_strides[0] + token * cos_strides[1]
    sin += row * sin_strides[0] + token * sin_strides[1]
    before = tl.cdiv(q_heads, HEADS)
    if block < before:
        _turn(q, q_out, row, token, block * HEADS + tl.arange(0, HEADS), q_heads, q_strides, q_out_strides, cos, sin, HALF, INTERPRET)
    else:
        head = (block - before) * HEADS + tl.arange(0, HEADS)
        _turn(k, k_out, row, token, head, k_heads, k_strides, k_out_strides, cos, sin, HALF, INTERPRET)


@triton.jit
def _gated_kernel(x, out, width, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, INTERPRET: tl.constexpr):
    """act(gate)·up of ``x`` [rows, 2, width]; both activations are x·sigmoid of something. Grid: (blocks of a row, rows)."""
    column, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    mask = column < width
    gate = tl.load(x + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * width + column, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = round_to(gate / (1.0 + tl.exp(-inner)), out.dtype.element_ty, INTERPRET).to(tl.float32)
    tl.store(out + row * width + column, round_to(active * up, out.dtype.element_ty, INTERPRET), mask=mask)


# ---------------------------------------------------------------- what stands in for a module's forward


def _norm(module: Any) -> Callable[..., torch.Tensor] | None:
    """Llama's form or Gemma's, told apart by how they call their epsilon; None for any other."""
    weight, gemma = getattr(module, "weight", None), not hasattr(module, "variance_epsilon")
    eps = getattr(module, "eps" if gemma else "variance_epsilon", None)
    if weight is None or not isinstance(eps, float) or weight.dim() != 1 or len(weight) > LARGEST:
        return None
    width, columns, plain = len(weight), triton.next_power_of_2(len(weight)), module.forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != module.weight.dtype:
            return plain(hidden_states)
        x = hidden_states.contiguous()
        out, rows, together = torch.empty_like(x), x.numel() // width, max(1, 1024 // columns)
        _norm_kernel[(triton.cdiv(rows, together),)](
            x, module.weight, out, eps, rows, WIDTH=width, COLUMNS=columns, ROWS=together, GEMMA=gemma, INTERPRET=fused.interpreting(),
            num_warps=8 if columns > 2048 else 4,
        )  # fmt: skip
        return out

    sample = _sample(weight, 3, width)
    return forward if _alike(forward(sample), plain(sample)) else None


def _rotary(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, Transformers' function, in one kernel where it turns whole heads [B, H, T, D] in the way of Llama."""

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any) -> Any:
        batch, heads, tokens, dim = q.shape
        known = not more and not named and {q.dtype, k.dtype, cos.dtype, sin.dtype} == {q.dtype} and cos.shape == sin.shape
        whole = cos.shape[-1] == dim == k.shape[-1] and dim == triton.next_power_of_2(dim)
        if not known or not whole or {one.stride(-1) for one in (q, k, cos, sin)} != {1}:
            return plain(q, k, cos, sin, *more, **named)
        cos, sin = cos.expand(batch, tokens, dim), sin.expand(batch, tokens, dim)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        blocks = triton.cdiv(heads, HEADS.value) + triton.cdiv(k.shape[1], HEADS.value)
        _rotary_kernel[(blocks, tokens, batch)](
            q, k, cos, sin, q_out, k_out, heads, k.shape[1],
            *(one.stride()[:3] for one in (q, k, q_out, k_out)), cos.stride()[:2], sin.stride()[:2],
            HALF=dim // 2, HEADS=HEADS, INTERPRET=fused.interpreting(), num_warps=2,
        )  # fmt: skip
        return q_out, k_out

    return apply


def _attention(module: Any) -> Callable[..., Any] | None:
    """The module's own forward, with another ``apply_rotary_pos_emb`` among its globals; None where that is not Llama's."""
    forward = inspect.unwrap(type(module).forward)
    plain = getattr(forward, "__globals__", {}).get("apply_rotary_pos_emb")
    factor = (getattr(getattr(module, "config", None), "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if plain is None or "apply_rotary_pos_emb" not in forward.__code__.co_names or factor != 1.0:
        return None
    if list(inspect.signature(plain).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    weight, apply = next(module.parameters()), _rotary(plain)
    q, k, cos, sin = (_sample(weight, *shape) for shape in ((2, 5, 3, 64), (2, 1, 3, 64), (2, 3, 64), (2, 3, 64)))
    if not all(map(_alike, apply(q, k, cos, sin), plain(q, k, cos, sin))):
        return None
    own = FunctionType(
        forward.__code__, forward.__globals__ | {"apply_rotary_pos_emb": apply}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(own, module)


def _mlp(module: Any) -> Callable[..., torch.Tensor] | None:
    """Gate and up in one product; None where there is a bias, another activation, or another form."""
    gate, x = module.gate_proj, torch.linspace(-8, 8, 101, device=module.gate_proj.weight.device)
    act = getattr(module, "act_fn", torch.zeros_like)
    name = next((name for function, name in ACTIVATIONS if torch.allclose(act(x), function(x), atol=1e-6)), None)
    if name is None or gate.bias is not None or module.up_proj.bias is not None:
        return None
    weight, width = _side_by_side(gate.weight, module.up_proj.weight), len(gate.weight)

    def forward(x: torch.Tensor) -> torch.Tensor:
        both = functional.linear(x, weight)
        out = both.new_empty(*both.shape[:-1], width)
        _gated_kernel[(triton.cdiv(width, BLOCK.value), out.numel() // width)](
            both, out, width, BLOCK=BLOCK, ACTIVATION=name, INTERPRET=fused.interpreting()
        )
        return module.down_proj(out)  # type: ignore[no-any-return]

    sample = _sample(weight, 3, weight.shape[1])
    return forward if _alike(forward(sample), module.forward(sample)) else None


def _sample(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(like.device, like.dtype)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """But for the order of sums."""
    return one.dtype == other.dtype and bool((one.float() - other.float()).abs().max() <= 2e-2 * other.float().abs().max())


def _side_by_side(gate: torch.nn.Parameter, up: torch.nn.Parameter) -> torch.Tensor:
    """Both weights [2·width, in] in one piece of memory, of which the parameters become views."""
    held = gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() and up.data_ptr() == gate.data_ptr() + gate.nbytes
    if held:
        return gate.detach().as_strided((2 * len(gate), gate.shape[1]), gate.stride())
    with torch.inference_mode(gate.is_inference()), torch.no_grad():
        both = torch.cat([gate, up])
        gate.data, up.data = both[: len(gate)], both[len(gate) :]
    return both


# ---------------------------------------------------------------- a whole model


def merge(model: torch.nn.Module) -> None:
    """Put the gate and up weights of every gated MLP side by side. Graphs that were captured before read the old places."""
    for module in _gated(model):
        _side_by_side(module.gate_proj.weight, module.up_proj.weight)
    torch.cuda.empty_cache()  # the old places are too small for what else is merged


def _gated(model: torch.nn.Module) -> list[Any]:
    names = ("gate_proj", "up_proj", "down_proj")
    found = [module for module in model.modules() if all(type(getattr(module, name, None)) is torch.nn.Linear for name in names)]
    return [module for module in found if module.gate_proj.weight.shape == module.up_proj.weight.shape]  # type: ignore[union-attr]


def restore(model: torch.nn.Module) -> None:
    """Take back what :func:`streamline` replaced; merged weights stay where they are."""
    for module in model.modules():
        if module.__dict__.pop("_streamlined", False):
            del module.forward


@torch.no_grad()
def streamline(model: torch.nn.Module) -> tuple[str, ...]:
    """Replace what can be, and name the classes of it. Waits for the device: not within a capture. Raises RefusedError without Triton."""
    if reason := fused.available(next(model.parameters()).device):
        raise RefusedError("backend", "The streamlined step needs Triton's kernels.", found=reason)
    restore(model)
    merge(model)
    gated, names = set(_gated(model)), set()
    for module in model.modules():
        kind = type(module).__name__
        if "forward" in module.__dict__:
            continue
        if kind.endswith("RMSNorm"):
            name, new = kind, _norm(module)
        elif module in gated:
            name, new = kind, _mlp(module)
        else:
            name, new = f"{kind}.apply_rotary_pos_emb", _attention(module)
        if new is not None:
            module.forward, module._streamlined = new, True  # type: ignore[assignment]
            names.add(name)
    return tuple(sorted(names))

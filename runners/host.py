"""Facts about this machine and this code, measured here. Absent is None; zero is zero."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import ledger
import runners
from ledger import digest, records

PACKAGES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "gguf",
    "tokenizers",
    "accelerate",
    "huggingface_hub",
    "flashinfer-python",
    "nvidia-cudnn-cu13",
    "msgspec",
    "rfc8785",
    "triton",
)
"""Distributions whose versions can change a figure, or the bytes it is written in."""


def measure(device: str | None = None) -> records.Host:
    """The host as it is now; ``threads`` is torch's setting, so set it before.

    The accelerator is the one that a run on ``device`` uses: none on a CPU. Without ``device``, the one that is there.
    """
    return records.Host(
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        processor=_processor(),
        cores=cores(),
        memory_bytes=_memory(),
        accelerator=torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else None,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        packages=_packages(),
    )


def cores() -> int:
    """Processors that this process may use, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError, AttributeError):
        return None


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # absent is not a version
            continue
    return found


def sources(besides: Iterable[str] = ()) -> dict[str, str]:
    """SHA-256 of every source file of ``ledger`` and ``runners`` that is loaded, by ``package/path``; of those ``besides`` too, if there.

    Found by location rather than by module name, so that the ``__main__`` module counts as the file that it is.
    """
    roots = {package.__name__: Path(str(package.__file__)).resolve().parent for package in (ledger, runners)}
    found = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not name:
            continue
        path = Path(name).resolve()
        for package, root in roots.items():
            if path.is_relative_to(root):
                found[f"{package}/{path.relative_to(root).as_posix()}"] = digest.sha256_file(path)[0]
    for path in set(besides) - set(found):
        package, _, rest = path.partition("/")
        if package in roots and (place := (roots[package] / rest).resolve()).is_relative_to(roots[package]) and place.is_file():
            found[path] = digest.sha256_file(place)[0]
    return dict(sorted(found.items()))


def peak_memory() -> int | None:
    """Largest resident size of this process so far, in bytes (``ru_maxrss`` is KiB on Linux, bytes on macOS)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

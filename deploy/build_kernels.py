"""Compile flashinfer's kernels into its package, where it looks before it compiles anything by itself.

Run while an image is built, with nvcc and without a GPU. What lies there is loaded at run time without a
compiler, a lock file or a writable cache. ``FLASHINFER_CUDA_ARCH_LIST`` names the architectures.

Not run yet with nvcc for SM100 and SM103: unverified on B200.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

MODULES = {
    "flashinfer.jit.norm": ("gen_norm_module",),
    "flashinfer.jit.page": ("gen_page_module",),
    "flashinfer.jit.rope": ("gen_rope_module",),
    "flashinfer.jit.sampling": ("gen_sampling_module",),
    "flashinfer.jit.attention.modules": ("gen_trtllm_gen_fmha_module",),
}
"""Where the generators of the kernels that a server can need are, in flashinfer 0.6.13."""


def generators() -> list[Callable[[], Any]]:
    """Functions without arguments, each of which describes one library to compile."""
    return [getattr(import_module(module), name) for module, names in MODULES.items() for name in names]


def main() -> int:
    if not os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        print(
            "FLASHINFER_CUDA_ARCH_LIST must name the architectures, for example '9.0a 10.0a'", file=sys.stderr
        )
        return 2
    from flashinfer.jit import env
    from flashinfer.jit.core import build_jit_specs

    specs = [generate() for generate in generators()]
    build_jit_specs(specs, verbose=False, skip_prebuilt=False)
    for spec in specs:
        spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, spec.aot_path)
        print(f"{spec.name}: {spec.aot_path.stat().st_size / 2**20:.1f} MiB")
    shutil.rmtree(env.FLASHINFER_WORKSPACE_DIR)
    return 0


if __name__ == "__main__":
    sys.exit(main())

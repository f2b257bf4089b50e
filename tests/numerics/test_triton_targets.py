"""The Triton kernels compile for accelerators that this machine does not have, and fit into their registers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.triton

COMPILE = """
import re, subprocess, sys, tempfile, warnings
from pathlib import Path
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ikkuna.numerics.statistics.device import kernels
from ikkuna.numerics.statistics.device import triton_launcher as launcher
from ikkuna.numerics.statistics.device.triton_launcher import BLOCK

warnings.simplefilter("ignore")
POINTERS = {"rows_ptr": "*fp64", "merged_ptr": "*fp64", "counts_ptr": "*i32", "scales_ptr": "*fp64"}

def spills(compiled, target):
    if target.backend == "hip":
        return sum(map(int, re.findall(r"_spill_count: *(\\d+)", compiled.asm["amdgcn"])))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\\d+)", usage)
    assert len(found) == 2, usage
    return sum(map(int, found))

def check(kernel, target, constants, **types):
    signature, aligned = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            continue
        pointer = POINTERS.get(name, "*i64") if name.endswith("_ptr") else None
        signature[name] = types.get(name) or pointer or parameter.annotation_type or "i32"
        if pointer:
            aligned[i,] = [["tt.divisibility", 16]]
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=target, options={"num_warps": 8, "enable_fp_fusion": True})
    print(kernel.__name__, list(constants.values()), types, "spills", spills(compiled, target), flush=True)

def check_all(target):
    block, drawn = BLOCK, launcher._DRAWN
    for short, dtype in (("fp32", tl.float32), ("bf16", tl.bfloat16)):
        for level, count in ((0, False), (1, False), (2, True)):
            check(kernels.measure_one, target, {"COUNT": count, "LEVEL": level, "BLOCK": block}, x_ptr="*" + short)
    for other in (0, 1, 2):
        constants = {"DTYPE": dtype, "OTHER": other, "ALIGNED": True, "COUNT": True, "LEVEL": 2, "BLOCK": block}
        check(kernels.measure_list, target, constants)
    check(kernels.sample_one, target, {"BLOCK": drawn}, x_ptr="*fp16")
    check(kernels.sample_list, target, {"DTYPE": dtype, "DIFFERENCE": True, "BLOCK": drawn})
    check(kernels.merge_rows, target, {"BATCH": launcher._BATCH})
    check(kernels.merge_codes, target, {"BLOCK": launcher._BINS}, merged_ptr="*i64")

backend, architecture, warp = sys.argv[1:]
check_all(GPUTarget(backend, int(architecture) if architecture.isdigit() else architecture, int(warp)))
"""


@pytest.mark.parametrize("target", ["cuda 80 32", "cuda 90 32", "hip gfx942 64"])
def test_kernels_compile_without_spills(target):
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *target.split()], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^(\w+) .* spills (\d+)$", done.stdout, re.MULTILINE)
    assert len(found) == 13, done.stdout
    assert not [(name, int(bytes_)) for name, bytes_ in found if int(bytes_)], done.stdout

"""`make test-processors`: the tests that depend on arithmetic, as other processors compute it.

Each setting caps the instructions of a library that multiplies: our kernels (TRIPTYCH_KERNELS), torch's own loops
(ATEN_CPU_CAPABILITY), oneDNN (ONEDNN_MAX_CPU_ISA) and MKL (MKL_CBWR, MKL_ENABLE_INSTRUCTIONS).  With some of them a row
of a product has other bits in a batch of another size, as on processors of other makers.

A process by itself says first what the variables do; where one has no effect on this machine, that is printed, and no
test runs.  Every process that runs tests asks again, and ends if one has no effect there.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from time import monotonic

SETTINGS: tuple[dict[str, str], ...] = (
    {"TRIPTYCH_KERNELS": "none"},
    {"TRIPTYCH_KERNELS": "portable", "ATEN_CPU_CAPABILITY": "default"},
    {"TRIPTYCH_KERNELS": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"TRIPTYCH_KERNELS": "avx512"},
    {"TRIPTYCH_KERNELS": "amx"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"MKL_CBWR": "COMPATIBLE"},
    {"MKL_CBWR": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
)
VARIABLES = sorted({name for setting in SETTINGS for name in setting})
PROVE = "TRIPTYCH_PROVE_SETTING"  # of the environment: processes of pytest end where a variable has no effect
#: What these libraries call the instructions, in what they print.
ONEDNN_NAMES = {"SSE41": "Intel SSE4.1", "AVX2": "Intel AVX2"}
MKL_NAMES = {"AVX2": "(Intel(R) AVX2) enabled processors", "SSE4_2": "(Intel(R) SSE4.2) enabled processors"}

#: Files of tests, or tests of a file, in which a wrong assumption about products would show.
TESTS: dict[str, str] = {
    "test_twins.py": "report or noticed",
    "test_patching.py": "standard_ablation or dead or almost_nothing or restores",
    "test_path_patching.py": "carries or composition or cannot_see",
    "test_native_binding.py": "torch_does_not_count",
    "test_native_training.py": "model or activation",
    "test_native_step.py": "rounded or every_part or any_batch or any_other_step",
    "test_native_encoder.py": "bits or decoder_gives or sources_in_bf16",
    "test_speculation.py": "bits or whatever",
    "test_prefixes.py": "bits or before",
    "test_scoring.py": "plain_forwards or beside",
    "test_cache_types.py": "reused or two_types or damaged",
    "test_packed_inside.py": "",
    "test_parity.py": "ragged",
    "test_attention.py": "agrees or nothing_to_see",
    "test_story.py": "cache or step_eight or positions",
}


def lines_of(library: str) -> list[str]:
    """What MKL or oneDNN prints of one computation; nothing where torch does not use it."""
    import torch

    backend = getattr(torch.backends, library)
    if not backend.is_available():
        return []
    with printed() as text, backend.verbose(backend.VERBOSE_ON):
        if library == "mkl":
            torch.ones(64, 64) @ torch.ones(64, 64)
        else:
            torch.nn.functional.conv2d(torch.ones(16, 16, 16, 16), torch.ones(16, 16, 3, 3))
    return text[0].splitlines()


@contextmanager
def printed() -> Iterator[list[str]]:
    """What C code prints on standard output meanwhile, once it is over."""
    text: list[str] = []
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield text
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


@cache
def in_use() -> dict[str, str]:
    """What each variable of a setting acts on, as the library itself reports it in this process, which it does once."""
    import torch

    from triptych.native import library

    kernels = library()
    reports = {
        "TRIPTYCH_KERNELS": "none" if kernels is None else kernels.level,
        "ATEN_CPU_CAPABILITY": torch.backends.cpu.get_cpu_capability().lower(),
    }
    wanted = [name for name in VARIABLES if os.environ.get(name)]
    if any(name.startswith("MKL") for name in wanted):
        lines = lines_of("mkl")
        mode = next((word for line in lines for word in line.split() if word.startswith("CNR:")), "no MKL")
        instructions = next((line for line in lines if "oneMKL" in line), "no MKL")
        reports |= {"MKL_ENABLE_INSTRUCTIONS": instructions, "MKL_CBWR": mode.removeprefix("CNR:")}
    if "ONEDNN_MAX_CPU_ISA" in wanted:
        isa = next((line for line in lines_of("mkldnn") if ",cpu,isa:" in line), "isa:no oneDNN")
        reports["ONEDNN_MAX_CPU_ISA"] = isa.rpartition("isa:")[2]
    return reports


def without_effect() -> dict[str, str]:
    """The variables that are set and did not take effect in this process, with what is in use instead."""
    from triptych import native

    reports, failed = in_use(), {}
    for name in VARIABLES:
        value = os.environ.get(name)
        if not value:
            continue
        report = reports[name]
        if name == "MKL_ENABLE_INSTRUCTIONS":
            took = MKL_NAMES.get(value, value) in report
        elif name == "ONEDNN_MAX_CPU_ISA":
            took = report == ONEDNN_NAMES.get(value, value)
        else:
            took = report == value
        if not took:
            reason = f" ({native.why_not()})" if name == "TRIPTYCH_KERNELS" and report == "none" else ""
            failed[name] = f"{name}={value} has no effect here: {report}{reason}"
    return failed


def header() -> str:
    """What the header of a test run says: our kernels, torch's instructions, and the settings that took effect."""
    import torch

    from triptych import native

    lacking = without_effect()
    took = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name) and name not in lacking]
    parts = [f"kernels: {native.describe()}", f"torch: {torch.backends.cpu.get_cpu_capability()}"]
    parts += [f"in effect: {', '.join(took)}"] if took else []
    return "; ".join([*parts, *lacking.values()])


def run(setting: dict[str, str], jobs: int) -> tuple[str, float]:
    """Run the tests in one setting: "passed", "failed", or why the setting cannot be had here; and the seconds."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | setting
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    asked = subprocess.run(
        [sys.executable, __file__, "--prove"], env=environment, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        return asked.stdout.strip() or asked.stderr.strip()[-500:], 0.0
    print(f"\n{asked.stdout.strip()}", flush=True)
    tests, began = Path(__file__).parent, monotonic()
    words = " or ".join(f"({file[:-3]} and ({chosen}))" if chosen else file[:-3] for file, chosen in TESTS.items())
    command = [sys.executable, "-m", "pytest", "-n", str(jobs), "-k", words, *(str(tests / file) for file in TESTS)]
    environment[PROVE] = "1"
    code = subprocess.run(command, env=environment, cwd=tests.parent, check=False).returncode
    return ("failed" if code else "passed"), monotonic() - began


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--prove", action="store_true", help="say what the variables of the environment do, and end")
    options.add_argument("--only", metavar="TEXT", default="", help="settings with this text in them")
    options.add_argument("-n", "--jobs", type=int, default=2, help="processes that run tests (default: 2)")
    chosen = options.parse_args()
    if chosen.prove:
        lacking = without_effect()
        print("; ".join(lacking.values()) or header())
        return 1 if lacking else 0
    every = [setting for setting in SETTINGS if chosen.only in str(setting)]
    results = {" ".join(f"{k}={v}" for k, v in setting.items()): run(setting, chosen.jobs) for setting in every}
    print()
    for name, (result, seconds) in results.items():
        print(f"{name}: {result}" + (f" in {seconds:.0f} s" if seconds else ""))
    if not any(seconds for _, seconds in results.values()):
        print("no setting could be had here")
    return int(any(result == "failed" for result, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())

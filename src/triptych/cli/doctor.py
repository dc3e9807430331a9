"""`triptych doctor`: this machine and the packages installed on it."""

from __future__ import annotations

from dataclasses import asdict

from . import options, screen
from .screen import mib

# Optional packages and what they are for.
EXTRAS = {
    "matplotlib": "loss.png of quickstart and train, plots of lab, inspect --save FILE.png",
    "transformers": "check --against transformers",
    "gguf": "check of a .gguf file against transformers",
}


def doctor(*, as_json: options.Json = False) -> None:
    """Report what Triptych detects: cores, instruction sets, memory, torch, GPU, installed packages."""
    from importlib.metadata import PackageNotFoundError, version

    from triptych import __version__, machine, native, pip_packages

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    with screen.waiting("loading torch"):
        threads = machine.use_threads()
        torch = machine.torch_facts()
    facts, cache = machine.look(), pip_packages.cache_directory()
    library = native.library()
    costs = "packed weights are dequantized, which takes more memory and time"
    kernels = native.describe() if library else f"{native.describe()}; {costs}"
    packages = sorted(path.name for path in (cache / "packages").glob("*-*") if path.is_dir())
    extras = {name: installed(name) for name in EXTRAS}
    if as_json:
        more = {"cache": str(cache), "packages": packages, "extras": extras, "threads": threads, "kernels": kernels}
        screen.result({"triptych": __version__} | asdict(facts) | {"torch": torch} | more)
        return
    cores = facts.cores
    quota = "no quota" if cores.quota is None else f"quota of {cores.quota:g}"
    limit = "" if facts.memory_limit is None else f", limited to {mib(facts.memory_limit)}"
    rows = [
        ("triptych", __version__),
        ("system", f"{facts.system}, {facts.processor}"),
        ("cores", f"{cores.usable} usable of {cores.online} (bound to {cores.affinity}, {quota})"),
        ("threads", f"{threads}"),
        ("instructions", " ".join(facts.isa) or "unknown"),
        ("memory", f"{_size(facts.memory)}, {_size(facts.memory_free)} free{limit}"),
        ("torch", f"{torch['version']}, {torch['code']} code"),
        ("kernels", kernels),
        ("GPU", f"{', '.join(torch['gpus']) or 'none'}; {torch['gpu']}"),
        ("cache", f"{cache}: {', '.join(packages) or 'empty'}"),
    ]
    rows += [(name, f"{number or 'not installed'}  ({EXTRAS[name]})") for name, number in extras.items()]
    screen.show(screen.facts(rows))


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else mib(nbytes)

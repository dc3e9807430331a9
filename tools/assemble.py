"""Assembles src/triptych/page/live_linear.wat into src/triptych/page/live_linear_bytes.js; `--check` compares instead.

The assembler is that of the package wasmtime (Apache-2.0), downloaded from PyPI into the cache and unpacked into a
temporary directory.  (The package wabt of PyPI downloads its programs from another host when it is first used.)
"""

import base64
import sys
import tempfile
import textwrap
import zipfile
from pathlib import Path

from triptych.errors import FetchError
from triptych.pip_packages import fetch_package

PAGE = Path(__file__).parents[1] / "src" / "triptych" / "page"
WASMTIME = ("wasmtime", "50.0.1", "cc14c3a17654e0394e0225b11813532ef0cd7bd1e222a0c5494cdedaabeddac4")


def assembled(source: str) -> bytes:
    """The bytes of a WebAssembly module.  Raises FetchError where the package cannot be had."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(fetch_package(*WASMTIME)) as wheel:
        wheel.extractall(folder)
        sys.path.insert(0, folder)
        from wasmtime import wat2wasm

        return bytes(wat2wasm(source))


def script(code: bytes) -> str:
    """live_linear_bytes.js."""
    lines = textwrap.wrap(base64.b64encode(code).decode(), 100)
    text = " +\n  ".join(f'"{line}"' for line in lines)
    return f"// live_linear.wat as WebAssembly; written by tools/assemble.py.\n\nconst LINEAR_WASM =\n  {text};\n"


def main() -> int:
    try:
        text = script(assembled((PAGE / "live_linear.wat").read_text(encoding="utf-8")))
    except FetchError as error:
        print(error, file=sys.stderr)
        return 2
    target = PAGE / "live_linear_bytes.js"
    if "--check" not in sys.argv:
        target.write_text(text, encoding="utf-8")
    elif target.read_text(encoding="utf-8") != text:
        print("live_linear_bytes.js is not what live_linear.wat assembles to; run tools/assemble.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

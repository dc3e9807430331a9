"""What to write in Triptych for a name, an argument, a command or an option of another library or program.

The libraries are transformers, sentence-transformers, PEFT, TransformerLens, vLLM, llama-cpp-python and PyTorch; the
programs are those of llama.cpp, Ollama and transformers.  The hints stand in `migration_hints.toml`.
"""

import re
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from .errors import ArgumentError, MissingNameError, nearest, shown

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PACKAGE: Mapping[str, str] = _TABLES["package"]
MODEL: Mapping[str, str] = _TABLES["model"]
TOKENIZER: Mapping[str, str] = _TABLES["tokenizer"]
WRONG_TYPE: Mapping[str, str] = _TABLES["wrong_type"]
RECIPE_KEYS: Mapping[str, str] = _TABLES["recipe_keys"]
LOAD = MODEL["load"]
_HEADS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
_THREADS = "OMP_NUM_THREADS=N before triptych"
_STDIN = "- in place of the text, which reads stdin: - < FILE"


def of_site(name: str) -> str:
    """The site that a hook of TransformerLens or a module of transformers stands for, where it is one of the usual."""
    block = re.match(r"(?:blocks|(?:model\.|gpt_neox\.)?layers|(?:transformer\.)?h)\.(\d+|\*)(?:\.|$)", name)
    rest = name[block.end() :] if block is not None else name
    site = _TABLES["sites"].get(rest, rest.replace("hook_", ""))
    return site if block is None else f"blocks.{block[1]}.{site}"


def of_package(name: str, known: Collection[str]) -> str:
    """ "; write ..." for a name that another library's package has; the nearest of the `known` ones for any other."""
    is_model = name.startswith("Auto") or name.endswith(_HEADS)
    return hint(name, {name: LOAD, **PACKAGE} if is_model else PACKAGE, known)


def hint(name: str, table: Mapping[str, str], known: Collection[str]) -> str:
    """ "; write ..." for a name in the table; for any other the nearest `known` one that is public."""
    if name in table:
        return f"; write {table[name]}"
    return nearest(name, [ours for ours in known if not ours.startswith("_")])


def of_argument(name: str, known: Collection[str]) -> str:
    """ "; write ..." for a keyword argument of another library; for any other the nearest of the `known` ones."""
    for ours in _TABLES["arguments"].get(name, ()):
        if "=" not in ours or ours.split("=")[0] in known:
            return f"; write {ours}"
    return nearest(name, known)


def answer_for(package: str) -> None:
    """Let a package say what to write for names of other libraries; mypy is to find unknown ones by itself."""
    names = vars(sys.modules[package])

    def unknown(name: str) -> NoReturn:
        raise MissingNameError(f"module {package!r} has no attribute {name!r}{of_package(name, names)}")

    names["__getattr__"] = unknown


class Explained:
    """Objects that say what to write for a name or an index that objects of another library have."""

    if not TYPE_CHECKING:  # mypy is to find unknown names by itself

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property, which raises its own error
                object.__getattribute__(self, name)
            raise MissingNameError(f"{type(self).__name__} has no {name!r}{hint(name, _TABLES['results'], dir(self))}")

        def __getitem__(self, key: object) -> NoReturn:
            name = type(self).__name__
            raise ArgumentError(f"{name} has no item {shown(key)}; write {_TABLES['items'].get(name, 'an attribute')}")


class ConstructorOfOthers:
    """A constructor that classes of another library have: asking a class of ours for it says what to write."""

    def __init__(self, write: str) -> None:
        self.write = write

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise MissingNameError(f"{owner.__name__} has no {self.name!r}; write {self.write}")


def of_commands(name: str) -> str:
    """What to type for a command of another program; "" for any other word."""
    return str(_TABLES["commands"].get(name, ""))


def of_options(name: str, options: Collection[str], usage: str) -> str:
    """What to type for an option of another program; "" where the command has nothing for it.

    `options` are those of the command, `usage` its usage line.
    """
    fitting = [ours for ours in _TABLES["options"].get(name, ()) if ours.split()[0] in options]
    if fitting:
        return str(fitting[0])
    argument = next((argument for argument in _TABLES["option_arguments"].get(name, ()) if argument in usage), None)
    if argument is not None:
        return f"{argument} without an option: {usage}"
    if name in ("-t", "--threads"):
        return _THREADS
    if name in ("-f", "--file") and ("PROMPT" in usage or "TEXT" in usage):
        return _STDIN
    spelled = "--" + name.lstrip("-").replace("_", "-")
    return spelled if spelled in options else ""

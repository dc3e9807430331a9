"""Names that users of other libraries and programs type, and what Triptych has for each.

The libraries are transformers, sentence-transformers, TransformerLens, vLLM, llama-cpp-python and PyTorch; the programs
are those of llama.cpp, Ollama and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from triptych.errors import nearest

P = ParamSpec("P")
R = TypeVar("R")

LOAD = 'triptych.load("a directory, a .gguf file or hub:org/name")'

_OF_PACKAGE = {
    "AutoTokenizer": f"{LOAD}.tokenizer",
    "AutoConfig": f"{LOAD}.spec, or .hf for the checkpoint's own config",
    "PreTrainedTokenizerFast": f"{LOAD}.tokenizer",
    "pipeline": f"{LOAD}, then model.generate, fill, classify, answer, encode or transcribe",
    "Trainer": "triptych.train(recipe), or triptych train RECIPE on the command line",
    "TrainingArguments": "triptych.train(recipe), or triptych train RECIPE on the command line",
    "GenerationConfig": "the options of model.generate(...)",
    "SamplingParams": "the options of model.generate(...)",
    "from_config": 'triptych.create({"model_type": "llama", ...})',
    "GPT2Config": 'triptych.create({"model_type": "gpt2", ...})',
    "LlamaConfig": 'triptych.create({"model_type": "llama", ...})',
}
_LOADERS = (
    "CrossEncoder", "GPT", "HookedEncoder", "HookedTransformer", "LLM", "LanguageModel", "Llama", "NNsight",
    "SentenceTransformer", "from_pretrained", "load_model", "open",
)  # fmt: skip
_HEADS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
_OF_MODEL = {
    "add_hook": "model.trace(texts, edit=[...])",
    "blocks": "model.module.decoder.blocks, or model.trace(texts, read=[...]) for what passes there",
    "layers": "model.module.decoder.blocks, or model.trace(texts, read=[...]) for what passes there",
    "cfg": "model.spec, or model.hf for the checkpoint's own config",
    "config": "model.spec, or model.hf for the checkpoint's own config",
    "create_chat_completion": "model.chat(messages)",
    "create_completion": "model.generate([prompt])",
    "embed": "model.encode(texts)",
    "forward": "model.logits(texts), or model.module(triptych.nn.Batch(...)) for hidden vectors with a graph",
    "from_config": "triptych.create(config)",
    "from_pretrained": LOAD,
    "from_spec": "triptych.create(spec)",
    "hook_dict": "triptych.probe.sites(model.spec)",
    "load": LOAD,
    "predict": "model.classify(texts), or model.generate(prompts)",
    "register_forward_hook": "model.trace(texts, read=[...]) or edit=[...]; model.module takes hooks of PyTorch too",
    "push_to_hub": "model.save(path), then hf upload",
    "run_with_cache": "model.trace(texts, read=[...])",
    "run_with_hooks": "model.trace(texts, edit=[...])",
    "save_pretrained": "model.save(path)",
    "sites": "triptych.probe.sites(model.spec)",
    "to_str_tokens": "model.tokenizer.decode([id]) for each id",
    "to_string": "model.tokenizer.decode(ids)",
    "to_tokens": "model.ids(texts)",
    "tokenize": "model.ids(texts)",
}
_OF_MODULE = (
    "cuda", "double", "dtype", "float", "half", "load_state_dict", "modules", "named_modules", "named_parameters",
    "requires_grad_", "state_dict",
)  # fmt: skip

# Keyword argument -> arguments of ours, of which the first that the function has is named; one without `=` always fits.
_CACHE = "nothing: a generation always has a cache"
_LENGTH = ("max_new_tokens=, which does not count the prompt",)
_TRACE = "model.trace, whose argument read names the sites"
_PATTERNS = ('read="*.pattern"', _TRACE)
_STREAM = ('read="*.resid_post"', _TRACE)
_SOME = ("read=", _TRACE)
_TENSORS = ("nothing: the result is a tensor, and .numpy() makes an array of it",)
_ARGUMENTS_OF_FUNCTIONS = {
    "torch_dtype": ("dtype=",), "device_map": ("device=",), "load_in_8bit": ('quantize="int8"',),
    "load_in_4bit": ('quantize="int4"',), "quantization_config": ("quantize=",), "local_files_only": ("offline=True",),
    "revision": ('the name as "hub:org/name@revision"',),
    "n_ctx": ("nothing: a cache has room for the prompt and max_new_tokens",),
    "trust_remote_code": ("nothing: code of a checkpoint is never run",),
    "low_cpu_mem_usage": ("nothing: weights are read one by one",),
    "attn_implementation": ("nothing: each call takes the fastest kernel that can serve it",),
    "n_gpu_layers": ("device=",), "max_length": _LENGTH, "max_tokens": _LENGTH, "n_predict": _LENGTH,
    "num_beams": ("beams=",), "do_sample": ("temperature= above 0 to sample; 0 takes the likeliest token",),
    "num_return_sequences": ("prompts=[prompt] * n with temperature= above 0",), "temp": ("temperature=",),
    "repeat_penalty": ("repetition_penalty=",), "stop_strings": ("stop=",), "stop_sequences": ("stop=",),
    "eos_token_id": ("stop=",), "pad_token_id": ("nothing: rows are never padded",), "use_cache": (_CACHE,),
    "inputs": ("prompts=",), "input_ids": ("prompts=",), "prompt": ("prompts=",), "streamer": ("on_token=",),
    "logits_processor": ("rules=",), "output_scores": ("logprobs=",), "assistant_model": ("draft=",),
    "prompt_lookup_num_tokens": ('draft="ngram" and draft_tokens=',), "stop_token_ids": ("stop=",),
    "n_threads": ("nothing: torch.set_num_threads(N) sets the threads",),
    "cache_implementation": ("cache=", _CACHE), "quantization": ("quantize=",), "max_num_seqs": ("max_rows=",),
    "batch_size": ("batch_tokens=", "max_rows="), "normalize_embeddings": ("normalize=",), "sentences": ("texts=",),
    "output_attentions": _PATTERNS, "output_hidden_states": _STREAM, "names_filter": _SOME, "fwd_hooks": ("edit=",),
    "return_type": _SOME, "remove_batch_dim": ("nothing: each row has a tensor of its own",),
    "convert_to_tensor": _TENSORS, "convert_to_numpy": _TENSORS,
}  # fmt: skip

_DOWNLOAD = "triptych inspect hub:org/name; every command downloads the hub:org/name that it is given"
_LIST = "triptych inspect MODEL for one model; models are files of your own, and triptych keeps no list of them"
_COMMANDS = {
    "completion": "triptych generate MODEL PROMPT",
    "download": _DOWNLOAD,
    "embed": "triptych encode MODEL TEXT",
    "eval": "triptych train, which evaluates, or triptych check MODEL",
    "export": "triptych convert MODEL OUT",
    "finetune": "triptych train RECIPE",
    "fine-tune": "triptych train RECIPE",
    "help": "triptych --help",
    "info": "triptych inspect MODEL",
    "list": _LIST,
    "ls": _LIST,
    "predict": "triptych generate MODEL PROMPT",
    "pull": _DOWNLOAD,
    "quantize": "triptych convert MODEL OUT.gguf --dtype q8_0, or --quantize int8 beside any command that runs a model",
    "run": "triptych chat MODEL, or triptych generate MODEL PROMPT",
    "serve": "triptych generate or triptych chat; there is no server",
    "show": "triptych inspect MODEL",
    "tokenize": "triptych explain MODEL TEXT",
    "verify": "triptych check MODEL",
    "version": "triptych --version",
}
# Option of another program -> options of ours, of which the first that a command has is named.
_OPTIONS = {
    "-n": ("--max-new-tokens",), "--n-predict": ("--max-new-tokens",), "--predict": ("--max-new-tokens",),
    "--num-predict": ("--max-new-tokens",), "--max-tokens": ("--max-new-tokens",),
    "--max-length": ("--max-new-tokens",), "--temp": ("--temperature",), "-temp": ("--temperature",),
    "-s": ("--seed",), "--repeat-penalty": ("--repetition-penalty",), "--num-beams": ("--beams",),
    "--num_beams": ("--beams",), "-sys": ("--system",), "--system-prompt": ("--system",), "-c": ("--context",),
    "--ctx-size": ("--context",), "-b": ("--batch",), "--batch-size": ("--batch",),
    "--load-in-8bit": ("--quantize int8",), "--load-in-4bit": ("--quantize int4",), "-ngl": ("--device cuda",),
    "--n-gpu-layers": ("--device cuda",), "--gpu": ("--device cuda",), "--cuda": ("--device cuda",),
    "--torch-dtype": ("--dtype",), "--outtype": ("--dtype",), "--fp16": ("--dtype fp16",),
    "--bf16": ("--dtype bf16",), "-o": ("--out", "--save"), "--output": ("--out", "--save"),
    "--output-dir": ("--out",), "--local-files-only": ("--offline",), "-l": ("--language", "--layer"),
    "-m": ("--model",),
}  # fmt: skip
# Options of other programs whose value is an argument here: what it may be called in the usage line.
_ARGUMENTS = {
    "-m": ("MODEL",), "--model": ("MODEL",), "--model-path": ("MODEL",), "--model-name": ("MODEL",), "-hf": ("MODEL",),
    "--hf-repo": ("MODEL",), "-p": ("PROMPT", "TEXT"), "--prompt": ("PROMPT", "TEXT"), "--text": ("PROMPT", "TEXT"),
    "--input": ("PROMPT", "TEXT", "FILE"), "--outfile": ("OUT",),
}  # fmt: skip
_THREADS = "OMP_NUM_THREADS=N before triptych"
_STDIN = "- in place of the text, which reads stdin: - < FILE"


# Hooks of TransformerLens and modules of transformers, without the number of the block -> the site.
_SITES = {
    "hook_embed": "embed", "hook_pos_embed": "embed", "ln_final.hook_normalized": "final", "unembed": "logits",
    "ln1.hook_normalized": "attn.in", "ln2.hook_normalized": "mlp.in", "hook_attn_in": "attn.in",
    "attn.hook_rot_q": "attn.q_rot", "attn.hook_rot_k": "attn.k_rot", "attn.hook_attn_scores": "attn.scores",
    "mlp.hook_pre": "mlp.up", "mlp.hook_pre_linear": "mlp.up", "mlp.hook_post": "mlp.act", "hook_attn_out": "attn.out",
    "hook_mlp_out": "mlp.out", "attn.hook_result": "attn.z", "self_attn": "attn.out", "attn": "attn.out",
    "attention": "attn.out", "self_attn.o_proj": "attn.out", "self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v", "mlp": "mlp.out", "mlp.down_proj": "mlp.out", "mlp.up_proj": "mlp.up",
    "mlp.gate_proj": "mlp.gate", "input_layernorm": "attn.in", "post_attention_layernorm": "mlp.in", "": "resid_post",
    "model.norm": "final", "transformer.ln_f": "final", "model.embed_tokens": "embed", "transformer.wte": "embed",
    "lm_head": "logits",
}  # fmt: skip


def of_site(name: str) -> str:
    """The site that a hook of TransformerLens or a module of transformers stands for, where it is one of the usual."""
    block = re.match(r"(?:blocks|(?:model\.|gpt_neox\.)?layers|(?:transformer\.)?h)\.(\d+|\*)(?:\.|$)", name)
    rest = name[block.end() :] if block is not None else name
    site = _SITES.get(rest, rest.replace("hook_", ""))
    return site if block is None else f"blocks.{block[1]}.{site}"


def of_package(name: str, known: Collection[str]) -> str:
    """ "; write ..." for a name that another library's package has; the nearest of the `known` ones for any other."""
    if name in _OF_PACKAGE:
        return f"; write {_OF_PACKAGE[name]}"
    if name in _LOADERS or name.startswith("Auto") or name.endswith(_HEADS):
        return f"; write {LOAD}"
    return nearest(name, known)


def of_model(name: str, known: Collection[str] = ()) -> str:
    """ "; write ..." for an attribute that another library's model has; for any other the nearest `known` one that is
    public."""
    if name in _OF_MODULE:
        return f"; write model.module.{name}"
    if name in _OF_MODEL:
        return f"; write {_OF_MODEL[name]}"
    return nearest(name, [one for one in known if not one.startswith("_")])


def of_argument(name: str, known: Collection[str]) -> str:
    """ "; write ..." for a keyword argument of another library; for any other the nearest of the `known` ones."""
    for ours in _ARGUMENTS_OF_FUNCTIONS.get(name, ()):
        if "=" not in ours or ours.split("=")[0] in known:
            return f"; write {ours}"
    return nearest(name, known)


def answers_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises a TypeError with what to write for a keyword argument that it does not have."""
    known = [name for name in signature(function).parameters if name != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{function.__name__} has no argument {name!r}{of_argument(name, known)}")
        return function(*args, **kwargs)

    return call


class NamesOfOthers(type):
    """The type of a class whose attributes that are not there are answered by `of_model`."""

    if not TYPE_CHECKING:  # mypy is to find unknown names by itself

        def __getattr__(cls, name: str) -> NoReturn:
            raise AttributeError(f"{cls.__name__} has no {name!r}{of_model(name, dir(cls))}")


def of_commands(name: str) -> str:
    """What to type for a command of another program; "" for any other word."""
    return _COMMANDS.get(name, "")


def of_options(name: str, options: Collection[str], usage: str) -> str:
    """What to type for an option of another program; "" where the command has nothing for it.

    `options` are those of the command, `usage` its usage line.
    """
    fitting = [ours for ours in _OPTIONS.get(name, ()) if ours.split()[0] in options]
    if fitting:
        return fitting[0]
    argument = next((argument for argument in _ARGUMENTS.get(name, ()) if argument in usage), None)
    if argument is not None:
        return f"{argument} without an option: {usage}"
    if name in ("-t", "--threads"):
        return _THREADS
    if name in ("-f", "--file") and ("PROMPT" in usage or "TEXT" in usage):
        return _STDIN
    spelled = "--" + name.lstrip("-").replace("_", "-")
    return spelled if spelled in options else ""

"""What to write in Triptych for a name, an argument, a command or an option of another library or program.

The libraries are transformers, sentence-transformers, PEFT, TransformerLens, vLLM, llama-cpp-python and PyTorch; the
programs are those of llama.cpp, Ollama and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NoReturn

from triptych.errors import MissingNameError, nearest

LOAD = 'triptych.load("a directory, a .gguf file or hub:org/name")'
_TRAIN = "triptych.train(recipe), or triptych train RECIPE on the command line"
_CREATE = 'triptych.create({"model_type": "llama", ...})'
_DTYPE = 'triptych.load(..., dtype="bf16"), or model.to("bf16")'
_BLOCKS = "model.module.decoder.blocks, or model.trace(texts, read=[...]) for what passes there"
_SPEC = "model.spec, or model.hf for the checkpoint's own config"

#: Names of packages; those that end in a head's name, or begin with Auto, are models too.
PACKAGE = {
    "AutoTokenizer": f"{LOAD}.tokenizer", "PreTrainedTokenizerFast": f"{LOAD}.tokenizer",
    "AutoConfig": f"{LOAD}.spec, or .hf for the checkpoint's own config",
    "pipeline": f"{LOAD}, then model.generate, fill, classify, answer, encode or transcribe",
    "Trainer": _TRAIN, "TrainingArguments": _TRAIN, "GenerationConfig": "the options of model.generate(...)",
    "from_config": _CREATE, "GPT2Config": _CREATE, "LlamaConfig": _CREATE,
    **dict.fromkeys(("HookedTransformer", "LLM", "Llama", "SentenceTransformer", "from_pretrained"), LOAD),
}  # fmt: skip
_HEADS = ("ForCausalLM", "ForMaskedLM", "LMHeadModel", "ForConditionalGeneration", "ForSequenceClassification")
MODEL = {
    "add_hook": "model.trace(texts, edit=[...])", "run_with_hooks": "model.trace(texts, edit=[...])",
    "run_with_cache": "model.trace(texts, read=[...])",
    "attentions": 'model.trace(texts, read="*.pattern")', "hidden_states": 'model.trace(texts, read="*.resid_post")',
    "blocks": _BLOCKS, "layers": _BLOCKS, "cfg": _SPEC, "config": _SPEC,
    "half": _DTYPE, "bfloat16": _DTYPE, "float": 'triptych.load(..., dtype="fp32"), or model.to("fp32")',
    "dtype": "model.module.dtype", "cuda": 'model.to("cuda")', "cpu": 'model.to("cpu")',
    "create_chat_completion": "model.chat(messages)", "create_completion": "model.generate([prompt])",
    "embed": "model.encode(texts)", "predict": "model.classify(texts), or model.generate(prompts)",
    "forward": "model.logits(texts), or model.module(triptych.nn.Batch(...)) for hidden vectors with a graph",
    "eos_token_id": "model.end_ids", "from_pretrained": LOAD, "load": LOAD,
    "push_to_hub": "model.save(path), then hf upload", "save_pretrained": "model.save(path)",
    "sites": "triptych.probe.sites(model.spec)", "to_tokens": "model.ids(texts)", "tokenize": "model.ids(texts)",
}  # fmt: skip
_SPECIALS = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")
_ENCODE = "tokenizer.encode(text), or tokenizer.encode_batch(texts)"
_BACKEND = "tokenizer.backend.{}, of the tokenizers library"
TOKENIZER = {
    **{f"{name}_token_id": f"tokenizer.{name}_id" for name in _SPECIALS},
    **{f"{name}_token": f"tokenizer.specials.{name}" for name in _SPECIALS},
    **dict.fromkeys(("encode_plus", "batch_encode_plus", "encode_fast"), _ENCODE), "__call__": _ENCODE,
    **{name: _BACKEND.format(f"{name}(...)") for name in ("get_vocab", "token_to_id", "id_to_token", "add_tokens")},
    "vocab": _BACKEND.format("get_vocab()"), "special_tokens_map": "tokenizer.specials",
    "apply_chat_template": "model.render(messages), or model.chat(messages)", "chat_template": "tokenizer.chat",
    "batch_decode": "[tokenizer.decode(row) for row in rows]", "convert_ids_to_tokens": "tokenizer.tokens(ids)",
    "convert_tokens_to_ids": _BACKEND.format("token_to_id(token)"), "from_pretrained": f"{LOAD}.tokenizer",
    "convert_tokens_to_string": "tokenizer.decode(ids)", "model_max_length": "model.spec.context",
    "pad": "nothing: rows are never padded", "save_pretrained": "tokenizer.save(directory)",
    "tokenize": "tokenizer.tokens(tokenizer.encode(text))",
}  # fmt: skip

# Keyword argument -> arguments of ours, of which the first that the function has is named; one without `=` always fits.
_CACHE = "nothing: a generation always has a cache"
_LENGTH = ("max_new_tokens=, which does not count the prompt",)
_TRACE = "model.trace, whose argument read names the sites"
_TENSORS = ("nothing: the result is a tensor, and .numpy() makes an array of it",)
_WHOLE = ("nothing: texts are never shortened or padded; cut the list of ids",)
_MASK = "mask=triptych.causal()"
_ARGUMENTS_OF_FUNCTIONS = {
    "torch_dtype": ("dtype=",), "half": ('dtype="bf16"',), "fp16": ('dtype="fp16"',), "bfloat16": ('dtype="bf16"',),
    "bf16": ('dtype="bf16"',), "outtype": ("dtype=",), "device_map": ("device=",), "n_gpu_layers": ("device=",),
    "load_in_8bit": ('quantize="int8"',), "load_in_4bit": ('quantize="int4"',), "quantization_config": ("quantize=",),
    "local_files_only": ("offline=True",),
    "revision": ('the name as "hub:org/name@revision"',),
    "n_ctx": ("nothing: a cache has room for the prompt and max_new_tokens",),
    "trust_remote_code": ("nothing: code of a checkpoint is never run",),
    "attn_implementation": ("nothing: each call takes the fastest kernel that can serve it",),
    "max_length": (*_LENGTH, *_WHOLE), "max_tokens": _LENGTH, "n_predict": _LENGTH, "num_beams": ("beams=",),
    "do_sample": ("temperature= above 0 to sample; 0 takes the likeliest token",), "temp": ("temperature=",),
    "num_return_sequences": ("prompts=[prompt] * n with temperature= above 0",),
    "repeat_penalty": ("repetition_penalty=",), "stop_strings": ("stop=",), "stop_sequences": ("stop=",),
    "eos_token_id": ("stop_ids=",), "stop_token_ids": ("stop_ids=",), "use_cache": (_CACHE,),
    "pad_token_id": ("nothing: rows are never padded",), "padding": ("nothing: rows are never padded",),
    "truncation": _WHOLE, "inputs": ("prompts=",), "input_ids": ("prompts=", "rows="), "prompt": ("prompts=",),
    "streamer": ("on_token=",), "logits_processor": ("rules=",), "output_scores": ("logprobs=",),
    "assistant_model": ("draft=",), "prompt_lookup_num_tokens": ('draft="ngram" and draft_tokens=',),
    "top_k": ("top=", "k="),
    "batch_size": ("batch_tokens=", "max_rows="), "normalize_embeddings": ("normalize=",), "sentences": ("texts=",),
    "output_attentions": ('read="*.pattern"', _TRACE), "output_hidden_states": ('read="*.resid_post"', _TRACE),
    "names_filter": ("read=", _TRACE), "fwd_hooks": ("edit=",),
    "convert_to_tensor": _TENSORS, "return_tensors": ("torch.tensor(ids)",), "add_special_tokens": ("special=",),
    "skip_special_tokens": ("skip_special=",), "labels": ("model.loss, whose argument they are",),
    "attention_mask": ("mask=",), "attn_mask": ("mask=",), "is_causal": (_MASK,), "dropout_p": ("dropout=",),
    "enable_gqa": ("nothing: k and v may have fewer heads than q",), "aggregation_strategy": ("strategy=",),
    "doc_stride": ("overlap=",), "r": ("rank=",), "lora_alpha": ("alpha=",), "lora_dropout": ("dropout=",),
    "target_modules": ("targets=",), "epochs": ("it into the recipe; triptych train --new FILE writes one",),
}  # fmt: skip

#: Function and argument -> what stands in the error for a value of a wrong type, where the type alone would not help.
_MODEL = "a model is a directory, a .gguf file or hub:org/name"
WRONG_TYPE = {
    "ModelInside.__init__ module": f"a Model needs a triptych.nn.Transformer; write {LOAD}",
    "load path": _MODEL, "convert model": _MODEL, "Model.save path": "a model becomes a directory or a .gguf file",
    "convert out": "the name to write to is that of a directory or a .gguf file",
    "draw spec": "a drawing is made of a spec: model.spec", "sites model": "sites are those of a spec: model.spec",
    "Scheduler.__init__ engine": "a scheduler runs an engine, as model.engine() makes one",
    "search folder": 'the folder comes first: model.search("notes/", "what to look for")',
    "ModelTraining.train mode": "a run is triptych.train(recipe); mode of model.train() is a bool",
    "Tokenizer.encode text": "give a string, or write tokenizer.encode_batch(texts) for a list of them",
    "Tokenizer.encode_batch texts": "give a list of texts, or write tokenizer.encode(text) for one text",
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
    is_model = name.startswith("Auto") or name.endswith(_HEADS)
    return hint(name, {name: LOAD, **PACKAGE} if is_model else PACKAGE, known)


def hint(name: str, table: Mapping[str, str], known: Collection[str]) -> str:
    """ "; write ..." for a name in the table; for any other the nearest `known` one that is public."""
    if name in table:
        return f"; write {table[name]}"
    return nearest(name, [ours for ours in known if not ours.startswith("_")])


def of_argument(name: str, known: Collection[str]) -> str:
    """ "; write ..." for a keyword argument of another library; for any other the nearest of the `known` ones."""
    for ours in _ARGUMENTS_OF_FUNCTIONS.get(name, ()):
        if "=" not in ours or ours.split("=")[0] in known:
            return f"; write {ours}"
    return nearest(name, known)


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

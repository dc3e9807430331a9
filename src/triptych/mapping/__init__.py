"""From the terms of files to those of a spec: typed config keys, GGUF metadata, reversible tables of tensor names.

`triptych.families` uses them, one file a family.  Nothing here imports torch.
"""
